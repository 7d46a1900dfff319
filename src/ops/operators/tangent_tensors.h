// Tangents and gradients of outputs, as the fused kernels of forward-mode and second derivatives
// read them.
#ifndef GNOMON_OPS_OPERATORS_TANGENT_TENSORS_H_
#define GNOMON_OPS_OPERATORS_TANGENT_TENSORS_H_

#include <ATen/ATen.h>

#include <deque>
#include <string_view>
#include <utility>

#include "core/dual_tables.h"
#include "ops/operators/argument_list.h"
#include "ops/operators/kernel_arguments.h"

namespace gnomon {

// Whether the fused kernels support a pair function: it must have a table of dual functions.
template <class T>
bool HasDualTable(std::string_view name) {
  bool has_table = false;
  Translate([&] { has_table = FindDualTable<T>(FindPairFunction(name)) != nullptr; });
  return has_table;
}

// The tangents of an operator's arguments, by name, and the tensors that views of them point into.
template <class Arguments>
class NamedTangents {
 public:
  explicit NamedTangents(const Tangents& tangents) : tangents_(tangents) {
    CheckTangentCount<Arguments>(tangents);
  }

  // Undefined if the tangent is 0.
  at::Tensor operator()(std::string_view name) { return At(accessed_.Index(name)); }
  // The tangent as contiguous numbers of type T; null if it is 0.
  template <class T>
  const T* Numbers(std::string_view name) {
    const at::Tensor tangent = (*this)(name);
    if (!tangent.defined()) return nullptr;
    const at::Tensor numbers = tangent.to(c10::CppTypeToScalarType<T>::value);
    return Keep(numbers.contiguous()).template const_data_ptr<T>();
  }
  const at::Tensor& Keep(at::Tensor tensor) { return kept_.emplace_back(std::move(tensor)); }

  // Throws unless every tangent has been accessed.
  void Done() const {
    accessed_.CheckAll("tangent", [&](size_t n) { return At(n); });
  }

 private:
  at::Tensor At(size_t n) const {
    return tangents_.empty() ? at::Tensor() : OrUndefined(tangents_.get(n));
  }

  const Tangents& tangents_;
  std::deque<at::Tensor> kept_;
  AccessedNames<Arguments> accessed_;
};

// The gradients of o and lse and their tangents, in type T, with contiguous rows.
template <class T>
class CotangentRows {
 public:
  explicit CotangentRows(const Cotangents& cotangents)
      : d_o_(WithRows(Wide(cotangents.d_o))),
        d_o_tangent_(Wide(cotangents.d_o_tangent)),
        d_lse_(Contiguous(AsOptional(Wide(cotangents.d_lse)))),
        d_lse_tangent_(Contiguous(AsOptional(Wide(cotangents.d_lse_tangent)))) {
    if (d_o_tangent_.defined()) d_o_tangent_ = WithRows(d_o_tangent_);
  }

  // Sets the members of a kernel's call. view(tensor) returns the view of rows.
  template <class Of, class ViewOf>
  void SetViews(const ViewOf& view, Of& of) const {
    of.d_o = view(d_o_);
    if (d_o_tangent_.defined()) of.d_o_tangent = view(d_o_tangent_);
    of.d_lse = Data<T>(d_lse_);
    of.d_lse_tangent = Data<T>(d_lse_tangent_);
  }

 private:
  static at::Tensor Wide(const OptionalTensor& tensor) {
    return tensor ? tensor->to(c10::CppTypeToScalarType<T>::value) : at::Tensor();
  }

  at::Tensor d_o_, d_o_tangent_, d_lse_, d_lse_tangent_;
};

}  // namespace gnomon

#endif  // GNOMON_OPS_OPERATORS_TANGENT_TENSORS_H_
