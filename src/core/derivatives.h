// Forward-mode and second derivatives of attention and of graph attention in fp32 and fp64, on
// plain views.
#ifndef GNOMON_SRC_CORE_DERIVATIVES_H_
#define GNOMON_SRC_CORE_DERIVATIVES_H_

#include "cpu/derivatives.h"
#include "cpu/graph_derivatives.h"
#include "gnomon/attention.h"

namespace gnomon {

// Check the arguments and the graph, throwing Error if one is invalid. T is float or double, and
// `function` is the function of the table in `of`; it must have a table (FindDualTable), which the
// inner product does not need in `of`. Results do not depend on the number of workers.
template <class T>
void DifferentiateAttention(const PairFunction& function, const AttentionDerivatives<T>& of,
                            const Executor& executor);
template <class T>
void DifferentiateGraph(const PairFunction& function, const GraphDerivatives<T>& of,
                        const Executor& executor);

}  // namespace gnomon

#endif  // GNOMON_SRC_CORE_DERIVATIVES_H_
