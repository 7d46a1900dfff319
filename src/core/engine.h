// The engine: dense attention in fp32 and fp64 and graph attention in fp32, with the functions of a
// pair table.
#ifndef GNOMON_SRC_CORE_ENGINE_H_
#define GNOMON_SRC_CORE_ENGINE_H_

#include "cpu/pair_table.h"
#include "gnomon/attention.h"
#include "gnomon/graph.h"

namespace gnomon {

// These two run on the selected instruction set; they throw Error if the table is for another one.
void EngineForward(const PairTable& table, const AttentionInput<float>& in,
                   const AttentionOutput<float>& out, const Executor& executor);
void EngineBackward(const PairTable& table, const AttentionInput<float>& in,
                    const AttentionBackwardInput<float>& saved,
                    const AttentionGradient<float>& gradient, const Executor& executor);
// These two run on the selected instruction set, or on a lower one if it has no float64 kernels.
void EngineForward(const PairTableOf<double>& table, const AttentionInput<double>& in,
                   const AttentionOutput<double>& out, const Executor& executor);
void EngineBackward(const PairTableOf<double>& table, const AttentionInput<double>& in,
                    const AttentionBackwardInput<double>& saved,
                    const AttentionGradient<double>& gradient, const Executor& executor);
// Returns null if the reference computes the call (see FindDualTable).
const PairTableOf<double>* FindDoubleTable(const PairFunction& function);
void EngineGraphForward(const PairTable& table, const GraphInput<float>& in,
                        const GraphOutput<float>& out, const Executor& executor);
void EngineGraphBackward(const PairTable& table, const GraphInput<float>& in,
                         const GraphBackwardInput<float>& saved,
                         const GraphGradient<float>& gradient, const Executor& executor);

}  // namespace gnomon

#endif  // GNOMON_SRC_CORE_ENGINE_H_
