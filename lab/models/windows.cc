#include "models/windows.h"

#include <set>

#include "gnomon/attention.h"
#include "training/options.h"
#include "training/strings.h"

namespace gnomon::lab {

void CheckLengths(const std::vector<int64_t>& lengths) {
  std::set<int64_t> seen;
  for (const int64_t length : lengths) {
    if (length < 1 || length > kMany) {
      throw Error(StrCat("--lengths contains ", length, "; expected lengths from 1 to ", kMany));
    }
    if (!seen.insert(length).second) throw Error(StrCat("--lengths: ", length, " is given twice"));
  }
  if (lengths.empty()) throw Error("--lengths: the list is empty; expected at least one length");
}

torch::Tensor Windows(const TokenText& text, const int64_t* starts, int64_t count, int64_t length) {
  torch::Tensor rows = torch::empty({count, length + 1}, torch::kLong);
  auto* out = rows.mutable_data_ptr<int64_t>();
  for (int64_t row = 0; row < count; ++row) {
    for (int64_t n = 0; n <= length; ++n) *out++ = text[starts[row] + n];
  }
  return rows;
}

torch::Tensor Losses(LanguageModel& model, const torch::Tensor& windows, LanguageModelCache* cache,
                     LanguageModelMemory* memory, const std::optional<BatchRows>& rows) {
  const int64_t length = windows.size(1) - 1;
  return model->losses(windows.narrow(1, 0, length), windows.narrow(1, 1, length), cache, memory,
                       rows);
}

}  // namespace gnomon::lab
