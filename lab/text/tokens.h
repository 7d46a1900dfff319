// The tokens that a language model reads: bytes, words or subwords.
#ifndef GNOMON_TEXT_TOKENS_H_
#define GNOMON_TEXT_TOKENS_H_

#include <concepts>
#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "text/text_data.h"
#include "training/options.h"

namespace gnomon::lab {

inline constexpr int64_t kByteVocabulary = 256;

// A text as a sequence of token ids. Copies are cheap.
class TokenText {
 public:
  TokenText() = default;
  // Each byte is a token. The bytes must outlive this object and its copies.
  template <std::convertible_to<std::string_view> Bytes>
  TokenText(const Bytes& bytes) : bytes_(bytes) {}  // NOLINT: implicit
  // Token n is ids[n]. It starts at the end of the previous token and ends before byte ends[n] of
  // the text.
  TokenText(std::vector<int32_t> ids, std::vector<int64_t> ends);

  int64_t size() const {
    return static_cast<int64_t>(tokens_ == nullptr ? bytes_.size() : tokens_->ids.size());
  }
  int64_t operator[](int64_t n) const {
    return tokens_ == nullptr ? static_cast<unsigned char>(bytes_[n]) : tokens_->ids[n];
  }
  // The number of bytes that the tokens `first` to `last` - 1 represent.
  int64_t CountBytes(int64_t first, int64_t last) const { return End(last) - End(first); }
  // Number of occurrences of `token`.
  int64_t Count(int64_t token) const;

 private:
  struct Tokens {
    std::vector<int32_t> ids;
    std::vector<int64_t> ends;
  };

  // The index of the byte after the first n tokens.
  int64_t End(int64_t n) const {
    if (tokens_ == nullptr) return n;
    return n == 0 ? 0 : tokens_->ends[n - 1];
  }

  std::string_view bytes_;
  std::shared_ptr<const Tokens> tokens_;
};

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  // The kind of tokens: "bytes", "words" or "subwords".
  virtual std::string kind() const = 0;
  // Vocabulary size.
  virtual int64_t size() const = 0;
  // The token for unknown words; none for tokenizers that can encode every text.
  virtual std::optional<int64_t> unknown() const { return std::nullopt; }
  // The content of a file from which ReadTokenizer() restores this tokenizer; empty for bytes.
  virtual std::string vocabulary() const = 0;

  // The text must outlive the result.
  virtual TokenText Encode(std::string_view text) const = 0;
  // The text of a token after the token `before`, or at the start of a text if there is none.
  virtual std::string Text(int64_t token, std::optional<int64_t> before) const = 0;
};

using TokenizerPtr = std::shared_ptr<const Tokenizer>;

inline constexpr const char* kTokenKinds[] = {"bytes", "words", "subwords"};

// The noun for one token in messages: "byte", "word" or "subword".
std::string TokenUnit(const std::string& kind);

#define GNOMON_TOKEN_OPTIONS(OPTION)                                                              \
  OPTION(std::string, kind, "bytes",                                                              \
         .help =                                                                                  \
             "Token kind: bytes; words, which are split at spaces, with <eos> for line ends and " \
             "<unk> for words that are not in the training text; or subwords, which "             \
             "SentencePiece learns from the training text",                                       \
         .flag = "tokens", .choices = {std::begin(kTokenKinds), std::end(kTokenKinds)})           \
  /* 0 for the default. */                                                                        \
  OPTION(int64_t, vocabulary, 0,                                                                  \
         .help =                                                                                  \
             "Vocabulary size: number of words (the most frequent ones, including <unk> and "     \
             "<eos>) or of subwords; default: all words, or 8000 subwords",                       \
         .shows_default = false, .may_lack = true)

struct TokenOptions {
  GNOMON_OPTIONS(GNOMON_TOKEN_OPTIONS)
};

// Throws Error if the kind is unknown, or the vocabulary size is invalid for it.
void CheckTokenOptions(const TokenOptions& options);

// Builds the vocabulary from a training text; throws Error if that fails.
TokenizerPtr BuildTokenizer(const TokenOptions& options, std::string_view training_text);

// Restores a tokenizer from its vocabulary(). Throws Error if the vocabulary is not valid for this
// kind.
TokenizerPtr ReadTokenizer(const std::string& kind, std::string_view vocabulary);

// Restores a tokenizer from the vocabulary of a task's assets. Throws Error if the vocabulary is
// missing, is not valid, or does not have `size` tokens.
TokenizerPtr RestoreTokenizer(const std::string& kind, std::string_view vocabulary,
                              std::optional<int64_t> size);

// The name of the file that contains a vocabulary of this kind; empty for bytes.
std::string VocabularyFile(const std::string& kind);

// Both splits of a text as tokens.
struct TokenData {
  TokenizerPtr tokenizer;
  TokenText train;
  TokenText valid;
};

// The data must outlive the result.
TokenData Tokenize(TokenizerPtr tokenizer, const TextData& data);

// Returns the number of tokens that represent about `bytes` bytes of a text.
int64_t TokensOfBytes(const TokenText& text, int64_t bytes);

}  // namespace gnomon::lab

#endif  // GNOMON_TEXT_TOKENS_H_
