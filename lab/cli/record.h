// The metadata of a record: time, command line, place and machine.
#ifndef GNOMON_CLI_RECORD_H_
#define GNOMON_CLI_RECORD_H_

#include <c10/core/Device.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace gnomon::cli {

// The command line, for the record of a run.
void RememberCommand(int argc, char** argv);
const std::vector<std::string>& CommandWords();

// "2026-01-31T12:00:00Z".
std::string Now();

// "20260131-120000", in local time.
std::string LocalTime();

// Includes the device of the models.
nlohmann::json DescribeMachine(c10::Device device = c10::Device(c10::kCPU));
nlohmann::json DescribeVersions();
// "AMD EPYC, 2 threads, AVX-512, torch 2.15.0"; of a GPU "NVIDIA H100 PCIe, torch 2.15.0".
std::string MachineLine(c10::Device device = c10::Device(c10::kCPU));

}  // namespace gnomon::cli

#endif  // GNOMON_CLI_RECORD_H_
