#include "text/text_data.h"

#include <algorithm>
#include <array>
#include <fstream>
#include <iterator>
#include <optional>
#include <system_error>
#include <utility>

#include "gnomon/attention.h"
#include "gnomon/sha256.h"
#include "training/files.h"
#include "training/strings.h"

namespace gnomon::lab {
namespace {

namespace fs = std::filesystem;

constexpr size_t kProbe = 8192;

bool Hidden(const fs::path& path) { return path.filename().string().starts_with('.'); }

std::string ReadFile(const fs::path& path) {
  if (IsDevice(path))
    throw Error(StrCat("the data file ", path.string(), " is a device; expected a regular file"));
  std::ifstream in(path, std::ios::binary);
  if (!in) throw Error(StrCat("cannot read the data file ", path.string()));
  std::string bytes{std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
  if (in.bad()) throw Error(StrCat("cannot read the data file ", path.string()));
  return WithoutMark(std::move(bytes));
}

bool LooksLikeText(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::array<char, kProbe> probe;
  in.read(probe.data(), probe.size());
  return std::find(probe.begin(), probe.begin() + in.gcount(), '\0') == probe.begin() + in.gcount();
}

std::vector<fs::path> TextFiles(const fs::path& folder) {
  std::vector<fs::path> files;
  std::error_code error;
  fs::recursive_directory_iterator entry(folder, error);
  if (error) throw Error(StrCat("cannot read the data folder ", folder.string()));
  for (; entry != fs::recursive_directory_iterator(); entry.increment(error)) {
    if (error) throw Error(StrCat("cannot read the data folder ", folder.string()));
    if (Hidden(entry->path())) {
      if (entry->is_directory()) entry.disable_recursion_pending();
    } else if (entry->is_regular_file() && LooksLikeText(entry->path())) {
      files.push_back(entry->path());
    }
  }
  std::sort(files.begin(), files.end());
  return files;
}

std::string ReadPart(const fs::path& path, int64_t* files) {
  if (!fs::is_directory(path)) {
    ++*files;
    return ReadFile(path);
  }
  std::string bytes;
  for (const fs::path& file : TextFiles(path)) {
    bytes += ReadFile(file);
    ++*files;
    if (bytes.size() > kMostTextBytes) {
      throw Error(StrCat("the data folder ", path.string(), " contains more than 4 GiB of text"));
    }
  }
  return bytes;
}

std::optional<fs::path> FindPart(const fs::path& folder, const std::vector<std::string>& names) {
  std::vector<fs::path> found;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end;
       entry.increment(error)) {
    const fs::path& path = entry->path();
    const std::string name =
        entry->is_directory() ? path.filename().string() : path.stem().string();
    if (std::find(names.begin(), names.end(), name) != names.end()) found.push_back(path);
  }
  if (found.empty()) return std::nullopt;
  if (found.size() > 1) {
    throw Error(StrCat("the data folder ", folder.string(), " contains both ",
                       found[0].filename().string(), " and ", found[1].filename().string(),
                       "; keep only one of them"));
  }
  return found[0];
}

// The output function of SplitMix64, a bijection that mixes all bits.
uint64_t Mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

}  // namespace

TextData ReadText(const fs::path& path) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (!fs::exists(status)) throw Error(StrCat("no such data file or folder: ", path.string()));
  if (path.extension() == ".safetensors") {
    throw Error(
        StrCat(path.string(),
               " contains arrays; pass a text file, or the --task that reads these arrays"));
  }
  TextData data;
  data.path = path.string();
  std::optional<fs::path> train;
  std::optional<fs::path> valid;
  if (fs::is_directory(status)) {
    train = FindPart(path, {"train"});
    valid = FindPart(path, {"valid", "validation", "val", "dev"});
  }
  if (train && valid) {
    data.train = ReadPart(*train, &data.files);
    data.valid = ReadPart(*valid, &data.files);
    if (data.train.empty()) throw Error(StrCat(train->string(), " contains no text"));
    if (data.valid.empty()) throw Error(StrCat(valid->string(), " contains no text"));
  } else {
    data.train = ReadPart(path, &data.files);
    if (data.train.empty()) {
      throw Error(
          StrCat(path.string(), fs::is_directory(status) ? " contains no text" : " is empty"));
    }
    const size_t cut = data.train.size() - data.train.size() / 10;
    data.valid = data.train.substr(cut);
    data.train.resize(cut);
  }
  Sha256 hash;
  hash.Update(data.train);
  hash.Update(data.valid);
  data.sha256 = hash.Hex();
  return data;
}

std::vector<int64_t> TrainingStarts(int64_t tokens, int64_t length, uint64_t seed, int64_t step,
                                    int64_t batch) {
  const auto choices = static_cast<uint64_t>(tokens - length);
  std::vector<int64_t> starts(batch);
  for (int64_t row = 0; row < batch; ++row) {
    const uint64_t mixed =
        Mix(Mix(Mix(seed) ^ static_cast<uint64_t>(step)) ^ static_cast<uint64_t>(row));
    starts[row] = static_cast<int64_t>(mixed % choices);
  }
  return starts;
}

int64_t StreamSegments(int64_t tokens, int64_t length, int64_t batch) {
  return std::max<int64_t>(tokens - length, 0) / batch / length;
}

StreamStep TrainingStream(int64_t tokens, int64_t length, uint64_t seed, int64_t step,
                          int64_t batch) {
  const int64_t segments = StreamSegments(tokens, length, batch);
  const int64_t part = (tokens - length) / batch;
  const uint64_t mixed = Mix(Mix(seed) ^ static_cast<uint64_t>(step / segments));
  const auto shift = static_cast<int64_t>(mixed % static_cast<uint64_t>(length));
  StreamStep stream;
  stream.begins = step % segments == 0;
  for (int64_t row = 0; row < batch; ++row) {
    stream.starts.push_back(shift + row * part + step % segments * length);
  }
  return stream;
}

std::vector<int64_t> EvaluationStarts(int64_t tokens, int64_t length, int64_t longest,
                                      int64_t budget) {
  const int64_t most = (tokens - 1) / longest;
  const int64_t stretches = std::clamp<int64_t>(budget / longest, 1, std::max<int64_t>(most, 1));
  const int64_t spare = tokens - 1 - stretches * longest;
  std::vector<int64_t> starts;
  for (int64_t s = 0; s < stretches; ++s) {
    const int64_t begin = s * longest + (stretches > 1 ? spare * s / (stretches - 1) : 0);
    for (int64_t at = 0; at + length <= longest; at += length) starts.push_back(begin + at);
  }
  return starts;
}

}  // namespace gnomon::lab
