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
void CheckEntries(const char* operation, const at::Tensor& q, const Pages& pages,
                  const CallArguments& arguments) {
  const at::Tensor& table = pages.table;
  if (!table.is_cpu() || !HasNumbers(table)) return;
  const int64_t size = pages.keys.size(2);
  const int64_t keys = table.size(1) * size;
  const auto bounds = [&](const char* name, const OptionalTensor& given, int64_t otherwise) {
    const OptionalTensor tensor = CheckIntegers(operation, name, given, q);
    return tensor && HasNumbers(*tensor) ? tensor->contiguous()
                                         : at::full({table.size(0)}, otherwise, at::kLong);
  };
  const at::Tensor starts = bounds("key_starts", arguments.key_starts, 0);
  const at::Tensor lengths = bounds("key_lengths", arguments.key_lengths, keys);
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
  CheckEntries(operation, q, pages, arguments);
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

void CheckPages(const OperatorArguments& a) {
  TORCH_CHECK_VALUE(a.page_table.has_value() == a.key_pages.has_value() &&
                        a.page_table.has_value() == a.value_pages.has_value(),
                    OperatorArguments::kOperation,
                    ": only some of key_pages, value_pages and page_table are given; expected all "
                    "three or none");
  if (!a.page_table) return;
  AxisLengths<int64_t> lengths;
  CheckArguments(a, lengths);
  const int64_t keys = *lengths['T'] * *lengths['L'];
  TORCH_CHECK_VALUE(*lengths['K'] == keys, OperatorArguments::kOperation, ": y has ", *lengths['K'],
                    " keys, but page_table and key_pages have ", keys,
                    "; expected the same number");
}

at::Tensor GatherSeenPages(const at::Tensor& pages, const at::Tensor& table,
                           const OptionalTensor& key_lengths) {
  const int64_t size = pages.size(2);
  const int64_t columns = table.size(1);
  const at::Tensor source = pages.transpose(1, 2);
  const at::Tensor entries = table.clamp(0, pages.size(0) - 1);
  const at::Tensor tokens =
      at::empty({table.size(0), columns, size, pages.size(1), pages.size(3)}, pages.options());
  for (int64_t b = 0; b < table.size(0); ++b) {
    int64_t seen = columns;
    if (key_lengths) {
      const int64_t length = std::max<int64_t>(0, (*key_lengths)[b].item<int64_t>());
      seen = std::min(columns, length / size + (length % size > 0 ? 1 : 0));
    }
    at::Tensor rows = tokens[b].narrow(0, 0, seen);
    at::index_select_out(rows, source, 0, entries[b].narrow(0, 0, seen));
  }
  return tokens.flatten(1, 2).transpose(1, 2);
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
