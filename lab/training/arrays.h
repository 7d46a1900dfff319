// User data as named arrays, read from a safetensors file with tensors named PART.NAME, such as
// "train.images" or "valid.labels" (docs/tasks.md). `gnomon data` writes these files.
#ifndef GNOMON_TRAINING_ARRAYS_H_
#define GNOMON_TRAINING_ARRAYS_H_

#include <torch/torch.h>

#include <cstdint>
#include <string>
#include <vector>

#include "training/safetensors.h"

namespace gnomon::lab {

class Arrays {
 public:
  Arrays() = default;
  // Throws Error if the file is not a valid safetensors file.
  explicit Arrays(const std::string& path);

  const std::string& path() const { return path_; }
  // Hash of all names, types, shapes and values; it does not depend on the layout of the file.
  const std::string& sha256() const { return sha256_; }
  bool Has(const std::string& name) const { return file_.tensors.contains(name); }

  // The following functions throw an Error that names the file, the array and the fault.

  int64_t CountAxes(const std::string& name) const;
  // Returns an array with `axes` axes and at least one element.
  const torch::Tensor& Get(const std::string& name, int64_t axes) const;
  // Returns an array of integers from `lowest` to `highest`, as int64.
  torch::Tensor Integers(const std::string& name, int64_t axes, int64_t lowest,
                         int64_t highest) const;
  // Returns an array of finite numbers, as float; bytes are divided by 255.
  torch::Tensor Numbers(const std::string& name, int64_t axes) const;
  // Checks that both arrays have the same number of rows.
  void CheckRows(const std::string& first, const std::string& second) const;
  // Returns the rows of a ragged array, as views. NAME contains all values in order, and
  // NAME_lengths contains the row lengths. Without lengths, NAME has an additional axis, and all
  // rows have the same length.
  std::vector<torch::Tensor> Rows(const std::string& name, int64_t axes) const;

 private:
  [[noreturn]] void Fail(const std::string& name, const std::string& fault) const;
  const torch::Tensor& Find(const std::string& name) const;

  std::string path_;
  SafeTensors file_;
  std::string sha256_;
};

}  // namespace gnomon::lab

#endif  // GNOMON_TRAINING_ARRAYS_H_
