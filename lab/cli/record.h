// The metadata of a record: time, command line, folder and machine.
#ifndef GNOMON_CLI_RECORD_H_
#define GNOMON_CLI_RECORD_H_

#include <c10/core/Device.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace gnomon::lab::cli {

// Stores the command line for the records of runs.
void RememberCommand(int argc, char** argv);
const std::vector<std::string>& CommandWords();

// The current time in UTC, such as "2026-01-31T12:00:00Z".
std::string Now();

// The current local time, such as "20260131-120000".
std::string LocalTime();

// Describes the machine, including the device of the models.
nlohmann::json DescribeMachine(c10::Device device = c10::Device(c10::kCPU));
nlohmann::json DescribeVersions();
// A line such as "AMD EPYC, 2 threads, AVX-512, torch 2.15.0" or, for a GPU, "NVIDIA H100 PCIe,
// torch 2.15.0".
std::string MachineLine(c10::Device device = c10::Device(c10::kCPU));

}  // namespace gnomon::lab::cli

#endif  // GNOMON_CLI_RECORD_H_
