// Logs the plan of each call, for GNOMON_LOG=calls.
#ifndef GNOMON_SRC_BASE_CALL_LOG_H_
#define GNOMON_SRC_BASE_CALL_LOG_H_

#include <string>

#include "gnomon/attention.h"

namespace gnomon {

// The engine's choices for a call.
struct CallPlan {
  const char* keys = "";          // how keys and values are read
  bool multiplies_pairs = false;  // products use the processor's bfloat16 instructions
  bool may_skip = false;          // tiles that are provably negligible may be skipped
};

// The engine writes its choices to this object unless the pointer is null.
inline thread_local CallPlan* call_plan = nullptr;

// Whether the environment variable GNOMON_LOG is "calls". It is read only once.
bool LogsCalls();

// Prints a call to standard error, once per process for each `kind`. Later calls of the same kind
// are not printed, even if their `sizes` differ.
void LogCall(const std::string& kind, const std::string& sizes);

// The properties of a call that select kernels, such as "dot, float32, causal, bias". Number is
// float, double or Dual.
template <class Number>
std::string DescribeCall(const PairFunction& function, const AttentionInput<Number>& in);

// Describes the sizes, such as "batch 1, heads 8, key heads 2, queries 128, keys 128".
std::string DescribeSizes(const AttentionShape& shape);

}  // namespace gnomon

#endif  // GNOMON_SRC_BASE_CALL_LOG_H_
