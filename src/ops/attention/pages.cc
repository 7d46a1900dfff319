#include "ops/attention/pages.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <bit>
#include <vector>

#include "ops/attention/call_checks.h"
#include "ops/operators/tensors.h"

namespace gnomon {
namespace {

// Throws unless every entry that a visible key uses names a page.
void CheckEntries(const char* operation, const Pages& pages, const CallArguments& arguments) {
  const at::Tensor& table = pages.table;
  if (!table.is_cpu() || !HasNumbers(table)) return;
  const int64_t size = pages.keys.size(2);
  const int64_t keys = table.size(1) * size;
  const auto bounds = [&](const OptionalTensor& tensor, int64_t otherwise) {
    return tensor && HasNumbers(*tensor)
               ? tensor->to(at::kLong).expand({table.size(0)}).contiguous()
               : at::full({table.size(0)}, otherwise, at::kLong);
  };
  const at::Tensor starts = bounds(arguments.key_starts, 0);
  const at::Tensor lengths = bounds(arguments.key_lengths, keys);
  const at::Tensor entries = table.contiguous();
  for (int64_t b = 0; b < table.size(0); ++b) {
    const int64_t first = std::max<int64_t>(0, starts.const_data_ptr<int64_t>()[b]);
    const int64_t last = std::min(keys, lengths.const_data_ptr<int64_t>()[b]);
    for (int64_t n = first / size; n * size < last; ++n) {
      const int64_t entry = entries.const_data_ptr<int64_t>()[b * table.size(1) + n];
      TORCH_CHECK_VALUE(entry >= 0 && entry < pages.keys.size(0), operation, ": page_table[", b,
                        ", ", n, "] is ", entry, "; expected 0 to ", pages.keys.size(0) - 1,
                        ", the pages of k, or key_lengths that hide its keys");
    }
  }
}

}  // namespace

Pages Pages::Of(const char* operation, const at::Tensor& q, const at::Tensor& k,
                const at::Tensor& v, const CallArguments& arguments) {
  TORCH_CHECK_VALUE(k.dim() == 4 && v.dim() == 4, operation, ": k and v have shapes ",
                    k.sym_sizes(), " and ", v.sym_sizes(),
                    "; expected (pages, Hkv, page size, head_dim), because page_table is given");
  TORCH_CHECK_VALUE(k.sym_size(0) >= 1 && k.sym_size(2) >= 1, operation, ": k has shape ",
                    k.sym_sizes(), "; expected at least one page of at least one key");
  TORCH_CHECK_VALUE(v.sym_size(0) == k.sym_size(0) && v.sym_size(1) == k.sym_size(1) &&
                        v.sym_size(2) == k.sym_size(2),
                    operation, ": v has shape ", v.sym_sizes(),
                    "; expected (pages, Hkv, page size, Dv) with the first three sizes of k ",
                    k.sym_sizes());
  const at::Tensor& table = *arguments.page_table;
  TORCH_CHECK_VALUE(table.dim() == 1 || table.dim() == 2, operation, ": page_table has shape ",
                    table.sym_sizes(), "; expected (B, pages of a sequence)");
  const Pages pages{k, v, *CheckIntegers(operation, "page_table", table, q, table.sym_size(-1))};
  CheckTokens(operation, q, ShapeOfGathered(k, pages.table), ShapeOfGathered(v, pages.table));
  CheckEntries(operation, pages, arguments);
  return pages;
}

bool Pages::AreReadable() const {
  const auto is_readable = [](const at::Tensor& tokens) {
    return tokens.sym_stride(3) == 1 || tokens.sym_size(3) == 1;
  };
  // Kernels compute pages of keys by shifts.
  return std::has_single_bit(static_cast<uint64_t>(SizeOf(keys, 2))) && is_readable(keys) &&
         is_readable(values);
}

at::Tensor GatherPages(const at::Tensor& pages, const at::Tensor& table) {
  const c10::SymInt batch = table.sym_size(0);
  const at::Tensor entries = table.clamp(0, SizeOf(pages, 0) - 1).flatten();
  // With heads after rows, the rows of a sequence are consecutive, so one copy suffices.
  return pages.transpose(1, 2)
      .index_select(0, entries)
      .view_symint(
          {batch, table.sym_size(1) * pages.sym_size(2), pages.sym_size(1), pages.sym_size(3)})
      .transpose(1, 2);
}

at::Tensor ShapeOfGathered(const at::Tensor& pages, const at::Tensor& table) {
  return pages.narrow(0, 0, 1).narrow(2, 0, 1).expand_symint({table.sym_size(0), pages.sym_size(1),
                                                              table.sym_size(1) * pages.sym_size(2),
                                                              pages.sym_size(3)});
}

}  // namespace gnomon
