// The operator in double precision, written as plain loops. Tests compare with it, and some fp64
// calls run on it. It shares only the definitions and the mask's interval with the fused kernels.
#ifndef GNOMON_SRC_REFERENCE_REFERENCE_H_
#define GNOMON_SRC_REFERENCE_REFERENCE_H_

#include "gnomon/attention.h"
#include "gnomon/graph.h"
#include "reference/dual.h"

namespace gnomon::reference {

template <class T>
struct PairDerivative {
  T g = 0;
  T a[3] = {0, 0, 0};
  T b[3] = {0, 0, 0};
  T t[3] = {0, 0, 0};
};

// A definition: its numbers of scalars, f, and the derivatives of f, in double and in dual numbers.
struct Table {
  PairInput input;
  int row_scalars;
  int column_scalars;
  int head_scalars;
  double (*value)(double g, const double* a, const double* b, const double* t);
  void (*gradient)(double g, const double* a, const double* b, const double* t,
                   PairDerivative<double>& d);
  void (*dual_gradient)(Dual g, const Dual* a, const Dual* b, const Dual* t,
                        PairDerivative<Dual>& d);

  double Value(double g, const double* a, const double* b, const double* t) const {
    return value(g, a, b, t);
  }
  void Gradient(double g, const double* a, const double* b, const double* t,
                PairDerivative<double>& d) const {
    gradient(g, a, b, t, d);
  }
  // Uses Gradient, so that forward mode and reverse mode have the same subgradients at kinks.
  Dual Value(Dual g, const Dual* a, const Dual* b, const Dual* t) const;
  void Gradient(Dual g, const Dual* a, const Dual* b, const Dual* t,
                PairDerivative<Dual>& d) const {
    dual_gradient(g, a, b, t, d);
  }
};

// T is double or Dual. With Dual, the results contain tangents.
template <class T>
void Forward(const Table& f, const AttentionInput<T>& in, const AttentionOutput<T>& out,
             const Executor& executor);
template <class T>
void Backward(const Table& f, const AttentionInput<T>& in, const AttentionBackwardInput<T>& saved,
              const AttentionGradient<T>& grad, const Executor& executor);
template <class T>
void GraphForward(const Table& f, const GraphInput<T>& in, const GraphOutput<T>& out,
                  const Executor& executor);
template <class T>
void GraphBackward(const Table& f, const GraphInput<T>& in, const GraphBackwardInput<T>& saved,
                   const GraphGradient<T>& grad, const Executor& executor);

// Registers and finds the table of a pair function, which provides its derivatives. AddTable
// returns true. FindTable throws Error if there is no such table.
bool AddTable(const PairFunction& function, const Table& table);
const Table& FindTable(const PairFunction& function);

// Creates the Table of a definition. Files that use it must first include reference/vocabulary.h.
template <class Definition>
struct Functions {
  static double Value(double g, const double* a, const double* b, const double* t) {
    return Definition::Value(g, a, b, t);
  }
  static void Gradient(double g, const double* a, const double* b, const double* t,
                       PairDerivative<double>& d) {
    Definition::Gradient(g, a, b, t, d);
  }
  static void DualGradient(Dual g, const Dual* a, const Dual* b, const Dual* t,
                           PairDerivative<Dual>& d) {
    Definition::Gradient(g, a, b, t, d);
  }

  static constexpr Table kTable = {.input = Definition::kInput,
                                   .row_scalars = Definition::kRowScalars,
                                   .column_scalars = Definition::kColumnScalars,
                                   .head_scalars = Definition::kHeadScalars,
                                   .value = Value,
                                   .gradient = Gradient,
                                   .dual_gradient = DualGradient};

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
