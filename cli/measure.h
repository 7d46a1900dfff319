// What times and memory are measured with.
#ifndef GNOMON_CLI_MEASURE_H_
#define GNOMON_CLI_MEASURE_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

namespace gnomon::cli {

// The upper one of two; 0 of no values.
double Median(std::vector<double> values);

// The value that `share` of the others lie below, 0 to 1; 0 of none.
double Quantile(std::vector<double> values, double share);

// Processor time that this process has taken so far, of all its threads together.
double ProcessorSeconds();

// How much of the machine other programs take, from its making on.
class OtherPrograms {
 public:
  OtherPrograms();
  // The share of all processors' time that other programs, or the machine's host, took since then:
  // 0 to 1; none where the system does not tell.
  std::optional<double> Share() const;

 private:
  // In seconds.
  struct Times {
    double all;   // of all processors together
    double idle;  // nobody's
    double own;   // this process's
  };
  static std::optional<Times> Now();
  std::optional<Times> start_;
};

// From now on every large block that is freed goes back to the system, as far as the C library can
// be told to: PeakBytes then sees the blocks that are in use. Later allocations are slower.
void GiveBackFreedMemory();

// Bytes that the process holds at the highest point of `work` beyond those that it held before;
// none where the system does not tell. It counts whole pages.
std::optional<int64_t> PeakBytes(const std::function<void()>& work);

}  // namespace gnomon::cli

#endif  // GNOMON_CLI_MEASURE_H_
