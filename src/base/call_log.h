// Which plan each call took, for GNOMON_LOG=calls.
#ifndef GNOMON_SRC_BASE_CALL_LOG_H_
#define GNOMON_SRC_BASE_CALL_LOG_H_

#include <string>

#include "gnomon/attention.h"

namespace gnomon {

// What the engine chose for a call.
struct CallPlan {
  const char* keys = "";          // how it reads keys and values
  bool multiplies_pairs = false;  // products by the processor's own instructions for bfloat16
  bool may_skip = false;          // tiles that are proved negligible are left out
};

// The engine writes its choice here; null: it is not asked for.
inline thread_local CallPlan* call_plan = nullptr;

// Whether the environment variable GNOMON_LOG asks for calls. It is read once.
bool LogsCalls();

// Prints a call to the standard error, once per process for each `kind`: later calls of the same
// kind may differ in `sizes`.
void LogCall(const std::string& kind, const std::string& sizes);

// The parts of a call that choose kernels: "dot, float32, causal, bias". Number: float or double.
template <class Number>
std::string DescribeCall(const PairFunction& function, const AttentionInput<Number>& in);

// "batch 1, heads 8, key heads 2, queries 128, keys 128".
std::string DescribeSizes(const AttentionShape& shape);

}  // namespace gnomon

#endif  // GNOMON_SRC_BASE_CALL_LOG_H_
