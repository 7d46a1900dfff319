// BLEU (Papineni et al. 2002) as computed by sacrebleu with default settings (Post 2018, A Call for
// Clarity in Reporting BLEU Scores). It is case-sensitive and uses one reference per line,
// mteval-v13a tokenization and n-grams of up to four tokens. N-gram orders without a match get NIST
// smoothing ("exp" in sacrebleu, method 3 of Chen and Cherry 2014).
#ifndef GNOMON_TEXT_BLEU_H_
#define GNOMON_TEXT_BLEU_H_

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace gnomon::lab {

inline constexpr size_t kBleuOrder = 4;
// The corresponding sacrebleu signature.
inline constexpr const char* kBleuSignature = "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp";

// Tokenizes a line of UTF-8 as mteval-v13a does.
std::vector<std::string> Tokenize13a(std::string_view line);

struct BleuScore {
  double score = 0;                             // 0 to 100
  std::array<double, kBleuOrder> precisions{};  // n-gram precisions, 0 to 100, smoothed
  double brevity_penalty = 1;
};

// Accumulates counts over the lines of a corpus.
class Bleu {
 public:
  void Add(std::string_view hypothesis, std::string_view reference);
  BleuScore Score() const;

 private:
  std::array<int64_t, kBleuOrder> matches_{};
  std::array<int64_t, kBleuOrder> ngrams_{};  // number of n-grams in the hypotheses
  int64_t hypothesis_tokens_ = 0;
  int64_t reference_tokens_ = 0;
};

// Splits a text at Unicode white space, like Python's str.split().
std::vector<std::string_view> SplitAtSpaces(std::string_view line);

}  // namespace gnomon::lab

#endif  // GNOMON_TEXT_BLEU_H_
