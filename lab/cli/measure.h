// Measurement of time and memory.
#ifndef GNOMON_CLI_MEASURE_H_
#define GNOMON_CLI_MEASURE_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

namespace gnomon::cli {

// The median (the upper of two); 0 if there are no values.
double Median(std::vector<double> values);

// The quantile at `share`, 0 to 1; 0 if there are no values.
double Quantile(std::vector<double> values, double share);

// CPU time used by all threads of this process so far.
double ProcessorSeconds();

// Measures the CPU usage of other programs since its construction.
class OtherPrograms {
 public:
  OtherPrograms();
  // The share of total CPU time used by other programs or the host since then, 0 to 1; none if the
  // system does not report it.
  std::optional<double> Share() const;

 private:
  // In seconds.
  struct Times {
    double all;   // summed over all processors
    double idle;  // idle
    double own;   // used by this process
  };
  static std::optional<Times> Now();
  std::optional<Times> start_;
};

// From now on, freed large blocks are returned to the system if the C library supports it, so that
// PeakBytes counts only blocks in use. Later allocations are slower.
void GiveBackFreedMemory();

// The peak memory of the process during `work` minus the memory before it, in bytes; none if the
// system does not report it. Counts whole pages.
std::optional<int64_t> PeakBytes(const std::function<void()>& work);

}  // namespace gnomon::cli

#endif  // GNOMON_CLI_MEASURE_H_
