// The engine: dense and graph attention in fp32, with the functions of a pair table.
#ifndef GNOMON_SRC_CORE_ENGINE_H_
#define GNOMON_SRC_CORE_ENGINE_H_

#include "cpu/pair_table.h"
#include "gnomon/attention.h"
#include "gnomon/graph.h"

namespace gnomon {

// Run on the selected instruction set. Throw Error if the table is for another one.
void EngineForward(const PairTable& table, const AttentionInput<float>& in,
                   const AttentionOutput<float>& out, const Executor& executor);
void EngineBackward(const PairTable& table, const AttentionInput<float>& in,
                    const AttentionBackwardInput<float>& saved,
                    const AttentionGradient<float>& gradient, const Executor& executor);
void EngineGraphForward(const PairTable& table, const GraphInput<float>& in,
                        const GraphOutput<float>& out, const Executor& executor);
void EngineGraphBackward(const PairTable& table, const GraphInput<float>& in,
                         const GraphBackwardInput<float>& saved,
                         const GraphGradient<float>& gradient, const Executor& executor);

}  // namespace gnomon

#endif  // GNOMON_SRC_CORE_ENGINE_H_
