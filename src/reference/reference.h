// The operator in double precision, written as plain loops. Tests use it as the oracle, and fp64
// tensors run on it. It shares only the definitions and the mask's interval with the fused kernels.
#ifndef GNOMON_SRC_REFERENCE_REFERENCE_H_
#define GNOMON_SRC_REFERENCE_REFERENCE_H_

#include "gnomon/attention.h"
#include "gnomon/graph.h"

namespace gnomon::reference {

struct PairDerivative {
  double g = 0;
  double a[3] = {0, 0, 0};
  double b[3] = {0, 0, 0};
  double t[3] = {0, 0, 0};
};

// A definition in double precision: its scalar counts, f, and the derivatives of f.
struct Table {
  PairInput input;
  int row_scalars;
  int column_scalars;
  int head_scalars;
  double (*value)(double g, const double* a, const double* b, const double* t);
  void (*gradient)(double g, const double* a, const double* b, const double* t, PairDerivative& d);
};

void Forward(const Table& f, const AttentionInput<double>& in, const AttentionOutput<double>& out,
             const Executor& executor);
void Backward(const Table& f, const AttentionInput<double>& in,
              const AttentionBackwardInput<double>& saved, const AttentionGradient<double>& grad,
              const Executor& executor);
void GraphForward(const Table& f, const GraphInput<double>& in, const GraphOutput<double>& out,
                  const Executor& executor);
void GraphBackward(const Table& f, const GraphInput<double>& in,
                   const GraphBackwardInput<double>& saved, const GraphGradient<double>& grad,
                   const Executor& executor);

// The Table of one definition, for use after including the vocabulary of double.
template <class Definition>
struct Functions {
  static double Value(double g, const double* a, const double* b, const double* t) {
    return Definition::Value(g, a, b, t);
  }
  static void Gradient(double g, const double* a, const double* b, const double* t,
                       PairDerivative& d) {
    Definition::Gradient(g, a, b, t, d);
  }

  static constexpr Table kTable = {.input = Definition::kInput,
                                   .row_scalars = Definition::kRowScalars,
                                   .column_scalars = Definition::kColumnScalars,
                                   .head_scalars = Definition::kHeadScalars,
                                   .value = Value,
                                   .gradient = Gradient};

  static void Forward(const AttentionInput<double>& in, const AttentionOutput<double>& out,
                      const Executor& executor) {
    reference::Forward(kTable, in, out, executor);
  }
  static void Backward(const AttentionInput<double>& in,
                       const AttentionBackwardInput<double>& saved,
                       const AttentionGradient<double>& grad, const Executor& executor) {
    reference::Backward(kTable, in, saved, grad, executor);
  }
  static void GraphForward(const GraphInput<double>& in, const GraphOutput<double>& out,
                           const Executor& executor) {
    reference::GraphForward(kTable, in, out, executor);
  }
  static void GraphBackward(const GraphInput<double>& in, const GraphBackwardInput<double>& saved,
                            const GraphGradient<double>& grad, const Executor& executor) {
    reference::GraphBackward(kTable, in, saved, grad, executor);
  }
};

}  // namespace gnomon::reference

#endif  // GNOMON_SRC_REFERENCE_REFERENCE_H_
