#include "training/arrays.h"

#include <string_view>

#include "gnomon/attention.h"
#include "gnomon/sha256.h"
#include "training/strings.h"

namespace gnomon::lab {
namespace {

// The first index where `wrong` is true, such as "[3, 0]".
std::string FirstPlace(const torch::Tensor& wrong) {
  const torch::Tensor places = wrong.nonzero();
  std::vector<std::string> indices;
  for (int64_t axis = 0; axis < places.size(1); ++axis) {
    indices.push_back(std::to_string(places[0][axis].item<int64_t>()));
  }
  return StrCat("[", Join(indices, ", "), "]");
}

}  // namespace

Arrays::Arrays(const std::string& path) : path_(path), file_(ReadSafeTensors(path)) {
  Sha256 hash;
  for (const auto& [name, tensor] : file_.tensors) {
    hash.Update(StrCat(name, " ", tensor.scalar_type(), " ", tensor.sizes(), "\n"));
    hash.Update({static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes()});
  }
  sha256_ = hash.Hex();
}

void Arrays::Fail(const std::string& name, const std::string& fault) const {
  throw Error(StrCat(path_, ": the array '", name, "' ", fault));
}

const torch::Tensor& Arrays::Find(const std::string& name) const {
  const auto found = file_.tensors.find(name);
  if (found != file_.tensors.end()) return found->second;
  std::vector<std::string> names;
  for (const auto& entry : file_.tensors) names.push_back(entry.first);
  Fail(name, "is missing; the file contains " + (names.empty() ? "no arrays" : Join(names, ", ")));
}

int64_t Arrays::CountAxes(const std::string& name) const { return Find(name).dim(); }

const torch::Tensor& Arrays::Get(const std::string& name, int64_t axes) const {
  const torch::Tensor& tensor = Find(name);
  if (tensor.dim() != axes || tensor.numel() == 0) {
    Fail(name, StrCat("has shape ", tensor.sizes(), "; expected ", axes,
                      axes == 1 ? " axis" : " axes", " and at least one element"));
  }
  return tensor;
}

torch::Tensor Arrays::Integers(const std::string& name, int64_t axes, int64_t lowest,
                               int64_t highest) const {
  const torch::Tensor& tensor = Get(name, axes);
  if (!at::isIntegralType(tensor.scalar_type(), /*includeBool=*/true)) {
    Fail(name, StrCat("has dtype ", tensor.scalar_type(), "; expected integers"));
  }
  const torch::Tensor numbers = tensor.to(torch::kLong);
  const torch::Tensor wrong = (numbers < lowest).logical_or(numbers > highest);
  if (wrong.any().item<bool>()) {
    Fail(name, StrCat("contains ", numbers.masked_select(wrong)[0].item<int64_t>(), " at ",
                      FirstPlace(wrong), "; expected ", lowest, " to ", highest));
  }
  return numbers;
}

torch::Tensor Arrays::Numbers(const std::string& name, int64_t axes) const {
  const torch::Tensor& tensor = Get(name, axes);
  const torch::Tensor numbers = tensor.to(torch::kFloat);
  if (tensor.scalar_type() == torch::kByte) return numbers.div(255);
  const torch::Tensor wrong = numbers.isfinite().logical_not();
  if (wrong.any().item<bool>()) {
    Fail(name, StrCat("contains ", numbers.masked_select(wrong)[0].item<float>(), " at ",
                      FirstPlace(wrong), "; expected finite numbers"));
  }
  return numbers;
}

void Arrays::CheckRows(const std::string& first, const std::string& second) const {
  const int64_t rows = file_.tensors.at(first).size(0);
  const int64_t others = file_.tensors.at(second).size(0);
  if (rows == others) return;
  Fail(second,
       StrCat("has ", others, " rows, but '", first, "' has ", rows, "; expected the same number"));
}

std::vector<torch::Tensor> Arrays::Rows(const std::string& name, int64_t axes) const {
  const std::string lengths_name = name + "_lengths";
  if (!Has(lengths_name) && CountAxes(name) == axes + 1) return Get(name, axes + 1).unbind(0);
  const torch::Tensor& values = Get(name, axes);
  const torch::Tensor lengths = Integers(lengths_name, 1, 0, values.size(0));
  const auto total = lengths.sum().item<int64_t>();
  if (total != values.size(0)) {
    Fail(lengths_name,
         StrCat("sums to ", total, ", but '", name, "' has ", values.size(0), " rows"));
  }
  std::vector<torch::Tensor> rows;
  int64_t at = 0;
  for (int64_t n = 0; n < lengths.numel(); ++n) {
    const auto length = lengths[n].item<int64_t>();
    rows.push_back(values.narrow(0, at, length));
    at += length;
  }
  return rows;
}

}  // namespace gnomon::lab
