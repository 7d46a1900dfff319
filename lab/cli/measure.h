// Measurement of time and memory.
#ifndef GNOMON_CLI_MEASURE_H_
#define GNOMON_CLI_MEASURE_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

namespace gnomon::lab::cli {

// The median (for an even number of values, the larger of the two middle ones); 0 if there are no
// values.
double Median(std::vector<double> values);

// The quantile at `share`, from 0 to 1; 0 if there are no values.
double Quantile(std::vector<double> values, double share);

// The CPU time in seconds that all threads of this process have used so far.
double ProcessorSeconds();

// Measures the CPU usage of other programs since its construction.
class OtherPrograms {
 public:
  OtherPrograms();
  // The fraction of total CPU time since construction that other programs or the host used; none if
  // the system does not report it.
  std::optional<double> Share() const;

 private:
  // CPU times in seconds.
  struct Times {
    double all;  // summed over all processors
    double idle;
    double own;  // used by this process
  };
  static std::optional<Times> Now();
  std::optional<Times> start_;
};

// Makes the C library (glibc) return large freed blocks to the system, so that PeakBytes counts
// only blocks in use. This slows down later allocations.
void GiveBackFreedMemory();

// The process's peak memory during `work` minus its memory before `work`, in bytes (whole pages).
// None if the system does not report it.
std::optional<int64_t> PeakBytes(const std::function<void()>& work);

}  // namespace gnomon::lab::cli

#endif  // GNOMON_CLI_MEASURE_H_
