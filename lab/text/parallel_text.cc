#include "text/parallel_text.h"

#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <system_error>
#include <utility>

#include "gnomon/attention.h"
#include "gnomon/sha256.h"
#include "text/utf8.h"
#include "training/files.h"
#include "training/strings.h"

namespace gnomon::lab {
namespace {

namespace fs = std::filesystem;

constexpr const char* kValidNames[] = {"valid", "validation", "val", "dev"};
constexpr std::pair<const char*, const char*> kLanguageNames[] = {{"src", "tgt"},
                                                                  {"source", "target"}};

// The split that a file name denotes: "train", "valid" or, for a test set, the name itself. Empty
// if the file belongs to no split.
std::string PartOf(const std::string& name) {
  if (name == kTrainPart || name.starts_with("test")) return name;
  const bool is_valid =
      std::find(std::begin(kValidNames), std::end(kValidNames), name) != std::end(kValidNames);
  return is_valid ? kValidPart : "";
}

// The files of each split, by language.
using PartFiles = std::map<std::string, std::map<std::string, fs::path>>;

PartFiles FindFiles(const fs::path& folder) {
  if (!fs::exists(folder)) throw Error(StrCat("no such data folder: ", folder.string()));
  if (!fs::is_directory(folder)) {
    throw Error(StrCat(folder.string(),
                       " is not a folder; expected one with train.LANGUAGE for two languages"));
  }
  std::vector<fs::path> files;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end;
       entry.increment(error)) {
    if (entry->is_regular_file()) files.push_back(entry->path());
  }
  if (error) throw Error(StrCat("cannot read the data folder ", folder.string()));
  std::sort(files.begin(), files.end());
  PartFiles parts;
  for (const fs::path& file : files) {
    const fs::path plain = file.extension() == ".gz" ? file.stem() : file.filename();
    const std::string part = PartOf(plain.stem().string());
    if (part.empty() || plain.extension().string().size() < 2) continue;
    const std::string language = plain.extension().string().substr(1);
    const auto [found, is_new] = parts[part].emplace(language, file);
    if (!is_new) {
      throw Error(StrCat(folder.string(), " contains both ", found->second.filename().string(),
                         " and ", file.filename().string(), "; keep only one of them"));
    }
  }
  if (parts.empty()) {
    throw Error(StrCat(folder.string(),
                       " contains no splits; expected files train.LANGUAGE and valid.LANGUAGE for "
                       "two languages, optionally with .gz"));
  }
  return parts;
}

// Determines the languages that the user has not given.
void ChooseLanguages(const fs::path& folder, const PartFiles& parts, std::string* source,
                     std::string* target) {
  std::set<std::string> languages;
  for (const auto& [part, files] : parts) {
    for (const auto& [language, file] : files) languages.insert(language);
  }
  if (source->empty() && target->empty()) {
    for (const auto& [from, to] : kLanguageNames) {
      if (!languages.contains(from) || !languages.contains(to)) continue;
      *source = from;
      *target = to;
      break;
    }
  }
  if (source->empty() != target->empty() && languages.size() == 2) {
    std::string& unknown = source->empty() ? *source : *target;
    const std::string& known = source->empty() ? *target : *source;
    if (languages.contains(known)) {
      unknown = *languages.begin() == known ? *languages.rbegin() : *languages.begin();
    }
  }
  if (source->empty() || target->empty()) {
    throw Error(StrCat(folder.string(), " has the languages ",
                       Join({languages.begin(), languages.end()}, ", "),
                       "; choose two with --source-language and --target-language"));
  }
  if (*source == *target) {
    throw Error(StrCat("--source-language and --target-language are both '", *source,
                       "'; choose two different languages"));
  }
}

// The name of a file in messages; the path "-" is standard input.
std::string NameOf(const fs::path& path) {
  return path == "-" ? "the standard input" : path.string();
}

// Reads a plain or gzipped file.
std::string ReadMaybeGzipped(const fs::path& path) {
  const std::unique_ptr<gzFile_s, int (*)(gzFile)> file(
      path == "-" ? gzdopen(dup(STDIN_FILENO), "rb") : gzopen(path.c_str(), "rb"), gzclose);
  const std::string name = NameOf(path);
  if (file == nullptr) throw Error(StrCat("cannot read the data file ", name));
  std::string bytes;
  std::array<char, 1 << 16> part;
  int count = 0;
  while ((count = gzread(file.get(), part.data(), part.size())) > 0) {
    bytes.append(part.data(), count);
    if (bytes.size() > kMostTextBytes) {
      throw Error(StrCat(name, " contains more than 4 GiB of text"));
    }
  }
  if (path.extension() == ".gz" && !bytes.empty() && gzdirect(file.get()) == 1) {
    throw Error(StrCat(name, " is not gzipped, although its name ends in .gz"));
  }
  int fault = Z_OK;
  gzerror(file.get(), &fault);
  if (fault == Z_BUF_ERROR) throw Error(StrCat(name, " is truncated: its gzip data ends early"));
  if (fault == Z_DATA_ERROR) throw Error(StrCat(name, " is damaged: its gzip data is not valid"));
  if (count < 0) throw Error(StrCat("cannot read the data file ", name));
  return WithoutMark(std::move(bytes));
}

[[noreturn]] void FailAt(const fs::path& path, size_t line, const char* fault) {
  throw Error(StrCat(NameOf(path), ": line ", line + 1, " is ", fault));
}

// Reads the lines of a file; throws Error if one is blank.
std::vector<std::string> ReadLines(const fs::path& path) {
  std::vector<std::string> lines = ReadSentences(path);
  const auto blank = std::find_if(lines.begin(), lines.end(), IsBlank);
  if (blank != lines.end()) FailAt(path, blank - lines.begin(), "empty");
  if (lines.empty()) throw Error(StrCat(path.string(), " is empty"));
  return lines;
}

// Draws a number below `bound`; the result is the same on all platforms.
size_t Below(size_t bound, std::mt19937_64* generator) { return (*generator)() % bound; }

template <class T>
void ShuffleAll(std::vector<T>* values, std::mt19937_64* generator) {
  for (size_t n = values->size(); n > 1; --n) {
    std::swap((*values)[n - 1], (*values)[Below(n, generator)]);
  }
}

}  // namespace

bool IsBlank(std::string_view line) {
  return line.find_first_not_of(" \t\r\v\f") == std::string_view::npos;
}

std::vector<std::string> ReadSentences(const fs::path& path) {
  const std::string bytes = ReadMaybeGzipped(path);
  std::vector<std::string> lines;
  std::string_view rest = bytes;
  while (!rest.empty()) {
    const size_t end = rest.find('\n');
    std::string_view line = rest.substr(0, end);
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (!IsUtf8(line)) FailAt(path, lines.size(), "not UTF-8");
    lines.emplace_back(line);
    rest.remove_prefix(end == std::string_view::npos ? rest.size() : end + 1);
  }
  return lines;
}

const ParallelPart* ParallelText::Find(std::string_view name) const {
  const auto found = std::find_if(parts.begin(), parts.end(),
                                  [&](const ParallelPart& part) { return part.name == name; });
  return found == parts.end() ? nullptr : &*found;
}

ParallelText ReadParallelText(const fs::path& folder, const std::string& source_language,
                              const std::string& target_language) {
  ParallelText text;
  text.path = folder.string();
  text.source_language = source_language;
  text.target_language = target_language;
  const PartFiles found = FindFiles(folder);
  ChooseLanguages(folder, found, &text.source_language, &text.target_language);
  for (const auto& [name, files] : found) {
    const auto source = files.find(text.source_language);
    const auto target = files.find(text.target_language);
    // This split has only files of other languages.
    if (source == files.end() && target == files.end()) continue;
    for (const auto& [language, file, other] :
         {std::tuple(&text.source_language, source, target),
          std::tuple(&text.target_language, target, source)}) {
      if (file == files.end()) {
        throw Error(StrCat(folder.string(), ": the split '", name, "' has ",
                           other->second.filename().string(), " but no file for '", *language,
                           "'; add this file"));
      }
    }
    ParallelPart part = {name, ReadLines(source->second), ReadLines(target->second)};
    if (part.source.size() != part.target.size()) {
      throw Error(StrCat(target->second.string(), " has ", part.target.size(), " lines, but ",
                         source->second.string(), " has ", part.source.size(),
                         "; expected the same number"));
    }
    text.parts.push_back(std::move(part));
    text.files += 2;
  }
  if (text.parts.empty()) {
    throw Error(StrCat(folder.string(), " contains no split for the languages '",
                       text.source_language, "' and '", text.target_language, "'"));
  }
  const auto rank = [](const ParallelPart& part) {
    return part.name == kTrainPart ? 0 : part.name == kValidPart ? 1 : 2;
  };
  std::stable_sort(text.parts.begin(), text.parts.end(),
                   [&](const ParallelPart& a, const ParallelPart& b) { return rank(a) < rank(b); });
  Sha256 hash;
  for (const ParallelPart& part : text.parts) {
    hash.Update(part.name + "\n");
    for (const auto* lines : {&part.source, &part.target}) {
      for (const std::string& line : *lines) hash.Update(line + "\n");
      hash.Update("\n");
    }
  }
  text.sha256 = hash.Hex();
  return text;
}

int64_t EndOfSentence(const Tokenizer& tokenizer) { return tokenizer.Encode("\n")[0]; }

Sentence EncodeSentence(const Tokenizer& tokenizer, std::string_view line) {
  const std::string whole = std::string(line) + "\n";
  const TokenText tokens = tokenizer.Encode(whole);
  Sentence sentence;
  sentence.reserve(tokens.size());
  for (int64_t n = 0; n < tokens.size(); ++n) sentence.push_back(static_cast<int32_t>(tokens[n]));
  return sentence;
}

std::string DecodeSentence(const Tokenizer& tokenizer, const std::vector<int64_t>& tokens) {
  std::string line;
  std::optional<int64_t> before;
  for (const int64_t token : tokens) {
    line += tokenizer.Text(token, before);
    before = token;
  }
  return ToUtf8(line);
}

SentenceBatches::SentenceBatches(std::vector<int64_t> source_lengths,
                                 std::vector<int64_t> target_lengths, uint64_t seed, int64_t batch)
    : source_lengths_(std::move(source_lengths)),
      target_lengths_(std::move(target_lengths)),
      seed_(seed),
      batch_(batch) {}

void SentenceBatches::Shuffle(int64_t pass) {
  std::seed_seq words = {static_cast<uint32_t>(seed_), static_cast<uint32_t>(seed_ >> 32),
                         static_cast<uint32_t>(pass), static_cast<uint32_t>(pass >> 32)};
  std::mt19937_64 generator(words);
  std::vector<int64_t> pairs(target_lengths_.size());
  std::iota(pairs.begin(), pairs.end(), 0);
  ShuffleAll(&pairs, &generator);
  std::stable_sort(pairs.begin(), pairs.end(), [&](int64_t a, int64_t b) {
    return std::pair(target_lengths_[a], source_lengths_[a]) <
           std::pair(target_lengths_[b], source_lengths_[b]);
  });
  // The first batch starts at a random offset; otherwise, the longest pairs would always be left
  // out.
  const int64_t batches = std::ssize(pairs) / batch_;
  const auto spare = static_cast<size_t>(std::ssize(pairs) - batches * batch_);
  const auto first = static_cast<int64_t>(Below(spare + 1, &generator));
  std::vector<int64_t> starts(batches);
  for (int64_t n = 0; n < batches; ++n) starts[n] = first + n * batch_;
  ShuffleAll(&starts, &generator);
  order_.clear();
  for (const int64_t start : starts) {
    order_.insert(order_.end(), pairs.begin() + start, pairs.begin() + start + batch_);
  }
  pass_ = pass;
}

std::vector<int64_t> SentenceBatches::Pairs(int64_t step) {
  const int64_t batches = std::ssize(target_lengths_) / batch_;
  if (step / batches != pass_) Shuffle(step / batches);
  const auto start = order_.begin() + step % batches * batch_;
  return {start, start + batch_};
}

}  // namespace gnomon::lab
