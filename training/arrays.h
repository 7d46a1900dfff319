// A user's own data as named arrays in parts: a file of safetensors whose tensors are called
// PART.NAME, "train.images" or "valid.labels" (docs/tasks.md). `gnomon data` writes such files.
#ifndef GNOMON_TRAINING_ARRAYS_H_
#define GNOMON_TRAINING_ARRAYS_H_

#include <torch/torch.h>

#include <cstdint>
#include <string>
#include <vector>

#include "training/safetensors.h"

namespace gnomon::models {

class Arrays {
 public:
  Arrays() = default;
  // Throws Error where the file is not one of safetensors.
  explicit Arrays(const std::string& path);

  const std::string& path() const { return path_; }
  // Of all names, types, shapes and values: the same data have the same one in any file.
  const std::string& sha256() const { return sha256_; }
  bool Has(const std::string& name) const { return file_.tensors.contains(name); }

  // These throw Error naming the file, the array and what is wrong with it.

  int64_t CountAxes(const std::string& name) const;
  // With this many axes, none of them empty.
  const torch::Tensor& Get(const std::string& name, int64_t axes) const;
  // Whole numbers from `lowest` to `highest`, as int64.
  torch::Tensor Integers(const std::string& name, int64_t axes, int64_t lowest,
                         int64_t highest) const;
  // Finite numbers, as float; bytes are divided by 255.
  torch::Tensor Numbers(const std::string& name, int64_t axes) const;
  // That both have the same number of rows.
  void CheckRows(const std::string& first, const std::string& second) const;
  // Rows of a ragged array: NAME has all values one after the other, NAME_lengths how many each row
  // has; or, without lengths, NAME has an axis more, and all rows are of one length. Views of it.
  std::vector<torch::Tensor> Rows(const std::string& name, int64_t axes) const;

 private:
  [[noreturn]] void Fail(const std::string& name, const std::string& fault) const;
  const torch::Tensor& Find(const std::string& name) const;

  std::string path_;
  SafeTensors file_;
  std::string sha256_;
};

}  // namespace gnomon::models

#endif  // GNOMON_TRAINING_ARRAYS_H_
