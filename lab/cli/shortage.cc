#include "cli/shortage.h"

#include <c10/util/Exception.h>
#include <new>
#include <stdexcept>

#include "gnomon/attention.h"
#include "training/strings.h"

namespace gnomon::lab::cli {
namespace {}  // namespace

std::optional<std::string> DescribeShortage(const std::exception& error) {
  if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr ||
      dynamic_cast<const std::length_error*>(&error) != nullptr) {
    return "";
  }
  const auto* const torch_error = dynamic_cast<const c10::Error*>(&error);
  if (torch_error == nullptr) return std::nullopt;
  const std::string message = torch_error->what_without_backtrace();
  // PyTorch's allocators report "you tried to allocate 512 bytes. ..." on the CPU and "Tried to
  // allocate 2.00 GiB. ..." on a GPU.
  constexpr std::string_view kWanted = "ried to allocate ";
  const size_t wanted = message.find(kWanted);
  if (wanted != std::string::npos) {
    const size_t begin = wanted + kWanted.size();
    return StrCat(": failed to allocate ",
                  message.substr(begin, message.find(". ", begin) - begin));
  }
  // These phrases occur in messages about sizes that exceed 64 bits, and about failed allocations.
  for (const char* part :
       {"multiplication overflow", "calculation overflow", "not enough memory"}) {
    if (message.find(part) != std::string::npos) return "";
  }
  return std::nullopt;
}

void NamingOptions(const std::string& options, const std::function<void()>& work) {
  try {
    work();
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    const std::optional<std::string> shortage = DescribeShortage(error);
    if (!shortage) throw;
    throw Error(StrCat("not enough memory for ", options, *shortage));
  }
}

}  // namespace gnomon::lab::cli
