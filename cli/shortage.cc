#include "cli/shortage.h"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <fstream>
#include <new>
#include <stdexcept>

#include "gnomon/attention.h"
#include "training/processes.h"
#include "training/strings.h"

namespace gnomon::cli {
namespace {

using models::StrCat;

constexpr double kGibibyte = int64_t{1} << 30;

// Of the machine, or of the control group that this process is in where that is less.
double MemoryBytes() {
  const double pages = static_cast<double>(::sysconf(_SC_PHYS_PAGES));
  double bytes = pages * static_cast<double>(::sysconf(_SC_PAGE_SIZE));
  for (const char* file :
       {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"}) {
    double limit = 0;
    if (std::ifstream(file) >> limit && limit > 0) bytes = std::min(bytes, limit);
  }
  return bytes;
}

// "12.5 GiB".
std::string Gibibytes(double bytes) {
  std::ostringstream text;
  text.precision(3);
  text << bytes / kGibibyte << " GiB";
  return text.str();
}

void CheckFits(const std::string& options, double bytes) {
  const double most = MemoryBytes();
  if (bytes <= most) return;
  throw Error(StrCat("not enough memory for ", options, ": they take at least ", Gibibytes(bytes),
                     ", and there are ", Gibibytes(most)));
}

// At the least: a similarity may have one column of queries and keys, which are left out.
double WeightBytes(const models::LanguageModelOptions& model) {
  const auto dim = static_cast<double>(model.dim);
  const auto layers = static_cast<double>(model.depth);
  const double layer = 2 * dim * (dim + static_cast<double>(model.mlp));
  return sizeof(float) * (static_cast<double>(model.vocabulary) * dim + layers * layer);
}

std::string ModelFlags(const models::LanguageModelOptions& model) {
  return StrCat("--dim ", model.dim, ", --depth ", model.depth, " and --mlp ", model.mlp);
}

}  // namespace

std::optional<std::string> DescribeShortage(const std::exception& error) {
  if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr ||
      dynamic_cast<const std::length_error*>(&error) != nullptr) {
    return "";
  }
  const auto* const torch_error = dynamic_cast<const c10::Error*>(&error);
  if (torch_error == nullptr) return std::nullopt;
  const std::string message = torch_error->what_without_backtrace();
  // "tried to allocate N bytes" of Torch's allocator.
  constexpr std::string_view kWanted = "tried to allocate ";
  const size_t wanted = message.find(kWanted);
  if (wanted != std::string::npos) {
    const size_t begin = wanted + kWanted.size();
    const size_t end = message.find_first_not_of("0123456789", begin);
    return StrCat(": it would allocate ", message.substr(begin, end - begin), " bytes");
  }
  // A size that does not fit into 64 bits.
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

void CheckModelFits(const models::LanguageModelOptions& model) {
  CheckFits(ModelFlags(model), WeightBytes(model));
}

void CheckTrainingFits(const models::LanguageModelOptions& model,
                       const models::TrainingOptions& training, int64_t processes) {
  // Weights, gradients and two moments.
  const double fixed = 4 * WeightBytes(model);
  CheckFits(ModelFlags(model), fixed);
  const auto dim = static_cast<double>(model.dim);
  const auto depth = static_cast<double>(model.depth);
  const auto mlp = static_cast<double>(model.mlp);
  const auto vocabulary = static_cast<double>(model.vocabulary);
  // Of each layer the stream before its two branches, their normed inputs, the values and the
  // output of attention, and the MLP's units before and after gelu; at the end the logits, their
  // logarithms and the gradient.
  const double numbers = depth * (6 * dim + 2 * mlp) + 3 * vocabulary;
  const double tokens = static_cast<double>(models::CountRows(training.batch, 0, processes)) *
                        static_cast<double>(training.length);
  CheckFits(StrCat("--batch ", training.batch, " and --length ", training.length),
            fixed + sizeof(float) * tokens * numbers);
}

}  // namespace gnomon::cli
