#include "text/tokens.h"

#include <algorithm>
#include <limits>
#include <unordered_map>
#include <utility>

#include "gnomon/attention.h"
#include "text/subwords.h"
#include "training/strings.h"

namespace gnomon::lab {
namespace {

class ByteTokenizer : public Tokenizer {
 public:
  std::string kind() const override { return "bytes"; }
  int64_t size() const override { return kByteVocabulary; }
  std::string vocabulary() const override { return ""; }
  TokenText Encode(std::string_view text) const override { return text; }
  std::string Text(int64_t token, std::optional<int64_t>) const override {
    return {static_cast<char>(token)};
  }
};

constexpr int32_t kUnknown = 0;
constexpr int32_t kLineEnd = 1;
constexpr int64_t kFewestWords = 3;  // <unk>, <eos> and one word
constexpr const char* kUnknownWord = "<unk>";
constexpr const char* kLineEndWord = "<eos>";

// Whether c is an ASCII space other than a line feed. A no-break space is part of a word.
bool IsSpace(char c) { return c == ' ' || c == '\t' || c == '\r' || c == '\v' || c == '\f'; }

// Calls visit(word, end) for each word, and visit("\n", end) for each line end. `end` is the index
// of the byte that follows.
template <class Visit>
void ForEachWord(std::string_view text, Visit visit) {
  size_t at = 0;
  while (at < text.size()) {
    if (IsSpace(text[at])) {
      ++at;
      continue;
    }
    size_t end = at + 1;
    if (text[at] != '\n') {
      while (end < text.size() && text[end] != '\n' && !IsSpace(text[end])) ++end;
    }
    visit(text.substr(at, end - at), static_cast<int64_t>(end));
    at = end;
  }
}

class WordTokenizer : public Tokenizer {
 public:
  // `words` begins with <unk> and <eos> and contains no duplicates.
  explicit WordTokenizer(std::vector<std::string> words) : words_(std::move(words)) {
    for (const std::string& word : words_) {
      ids_.emplace(word, static_cast<int32_t>(ids_.size()));
    }
  }
  // Not copyable, because the keys of ids_ are views of words_.
  WordTokenizer(const WordTokenizer&) = delete;
  WordTokenizer& operator=(const WordTokenizer&) = delete;

  std::string kind() const override { return "words"; }
  int64_t size() const override { return static_cast<int64_t>(words_.size()); }
  std::optional<int64_t> unknown() const override { return kUnknown; }
  std::string vocabulary() const override { return Join(words_, "\n") + "\n"; }

  TokenText Encode(std::string_view text) const override {
    std::vector<int32_t> ids;
    std::vector<int64_t> ends;
    ForEachWord(text, [&](std::string_view word, int64_t end) {
      const auto found = ids_.find(word);
      ids.push_back(word == "\n" ? kLineEnd : found == ids_.end() ? kUnknown : found->second);
      ends.push_back(end);
    });
    return TokenText(std::move(ids), std::move(ends));
  }

  std::string Text(int64_t token, std::optional<int64_t> before) const override {
    if (token == kLineEnd) return "\n";
    const bool begins_line = !before || *before == kLineEnd;
    return (begins_line ? "" : " ") + words_[token];
  }

 private:
  std::vector<std::string> words_;
  std::unordered_map<std::string_view, int32_t> ids_;
};

TokenizerPtr BuildWords(int64_t vocabulary, std::string_view text) {
  struct Seen {
    std::string_view word;
    int64_t count = 0;
  };
  std::vector<Seen> seen;
  std::unordered_map<std::string_view, size_t> index;
  ForEachWord(text, [&](std::string_view word, int64_t) {
    if (word == "\n" || word == kUnknownWord || word == kLineEndWord) return;
    const auto [entry, is_new] = index.emplace(word, seen.size());
    if (is_new) seen.push_back({word});
    ++seen[entry->second].count;
  });
  if (seen.empty()) throw Error("words: the training text contains no words");
  // Words with equal counts keep the order of their first occurrence.
  std::stable_sort(seen.begin(), seen.end(),
                   [](const Seen& a, const Seen& b) { return a.count > b.count; });
  std::vector<std::string> words = {kUnknownWord, kLineEndWord};
  for (const Seen& entry : seen) {
    if (vocabulary > 0 && static_cast<int64_t>(words.size()) == vocabulary) break;
    words.emplace_back(entry.word);
  }
  return std::make_shared<WordTokenizer>(std::move(words));
}

TokenizerPtr ReadWords(std::string_view file) {
  std::vector<std::string> words;
  std::unordered_map<std::string_view, bool> seen;
  while (!file.empty()) {
    const size_t end = file.find('\n');
    const std::string_view word = file.substr(0, end);
    const auto fail = [&](const char* fault) {
      throw Error(StrCat("its word vocabulary: line ", words.size() + 1, " ", fault));
    };
    if (end == std::string_view::npos) fail("does not end with a line break");
    if (word.empty() || std::any_of(word.begin(), word.end(), IsSpace)) {
      fail("is not a single word");
    }
    if (!seen.emplace(word, true).second) fail("appears twice");
    words.emplace_back(word);
    file.remove_prefix(end + 1);
  }
  if (static_cast<int64_t>(words.size()) < kFewestWords || words[kUnknown] != kUnknownWord ||
      words[kLineEnd] != kLineEndWord) {
    throw Error(StrCat("its word vocabulary does not begin with ", kUnknownWord, ", ", kLineEndWord,
                       " and a word"));
  }
  return std::make_shared<WordTokenizer>(std::move(words));
}

}  // namespace

TokenText::TokenText(std::vector<int32_t> ids, std::vector<int64_t> ends)
    : tokens_(std::make_shared<Tokens>(Tokens{std::move(ids), std::move(ends)})) {}

int64_t TokenText::Count(int64_t token) const {
  int64_t count = 0;
  for (int64_t n = 0; n < size(); ++n) count += (*this)[n] == token ? 1 : 0;
  return count;
}

std::string TokenUnit(const std::string& kind) { return kind.substr(0, kind.size() - 1); }

void CheckTokenOptions(const TokenOptions& options) {
  TokenOptions checked = options;
  CheckRanges(checked.Options(), "");
  if (options.vocabulary == 0) return;
  if (options.kind == "bytes") {
    throw Error(StrCat("--vocabulary is ", options.vocabulary,
                       "; leave it out, because it applies only to --tokens words or subwords"));
  }
  const int64_t fewest = options.kind == "words" ? kFewestWords : kFewestSubwords;
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  if (options.vocabulary < fewest || options.vocabulary > kMost) {
    throw Error(StrCat("--vocabulary is ", options.vocabulary, "; expected ", fewest, " to ", kMost,
                       " ", options.kind));
  }
}

TokenizerPtr BuildTokenizer(const TokenOptions& options, std::string_view training_text) {
  CheckTokenOptions(options);
  if (options.kind == "words") return BuildWords(options.vocabulary, training_text);
  if (options.kind == "subwords") return BuildSubwords(options.vocabulary, training_text);
  return std::make_shared<ByteTokenizer>();
}

TokenizerPtr ReadTokenizer(const std::string& kind, std::string_view vocabulary) {
  CheckTokenOptions({kind});
  if (kind == "words") return ReadWords(vocabulary);
  if (kind == "subwords") return ReadSubwords(vocabulary);
  if (!vocabulary.empty()) throw Error("it has a vocabulary, but byte tokens have none");
  return std::make_shared<ByteTokenizer>();
}

TokenizerPtr RestoreTokenizer(const std::string& kind, std::string_view vocabulary,
                              std::optional<int64_t> size) {
  const bool is_missing = vocabulary.empty() && kind != "bytes";
  if (is_missing) throw Error("the tensor 'tokens.vocabulary' is missing");
  TokenizerPtr tokenizer = ReadTokenizer(kind, vocabulary);
  if (size && tokenizer->size() != *size) {
    throw Error(
        StrCat("its vocabulary has ", tokenizer->size(), " tokens, but its model has ", *size));
  }
  return tokenizer;
}

std::string VocabularyFile(const std::string& kind) {
  return kind == "bytes" ? "" : kind == "words" ? "vocabulary.txt" : "vocabulary.model";
}

TokenData Tokenize(TokenizerPtr tokenizer, const TextData& data) {
  TokenData tokens;
  tokens.train = tokenizer->Encode(data.train);
  tokens.valid = tokenizer->Encode(data.valid);
  tokens.tokenizer = std::move(tokenizer);
  return tokens;
}

int64_t TokensOfBytes(const TokenText& text, int64_t bytes) {
  const int64_t all = text.CountBytes(0, text.size());
  if (all == 0) return 0;
  const double share = static_cast<double>(text.size()) / static_cast<double>(all);
  return static_cast<int64_t>(static_cast<double>(bytes) * share);
}

}  // namespace gnomon::lab
