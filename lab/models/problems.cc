#include "models/problems.h"

#include <algorithm>
#include <utility>

#include "gnomon/attention.h"
#include "training/options.h"
#include "training/strings.h"

namespace gnomon::lab {
namespace {

// Maximum number of distinct symbols in most problems.
constexpr int64_t kManySymbols = 65536;

std::vector<std::string> Numbered(const std::string& prefix, int64_t count) {
  std::vector<std::string> words;
  for (int64_t n = 0; n < count; ++n) words.push_back(StrCat(prefix, n));
  return words;
}

std::vector<std::string> Symbols(int64_t symbols) {
  std::vector<std::string> words = Numbered("", symbols);
  words.emplace_back("=");
  return words;
}

int64_t Any(int64_t /*symbols*/) { return kMany; }

// Draws `length` random symbols, appends them and the mark to `row`, and returns them.
std::vector<int64_t> DrawInput(int64_t symbols, int64_t length, Draws* draws, ProblemRow* row) {
  std::vector<int64_t> input(length);
  for (int64_t& symbol : input) row->Add(symbol = draws->Below(symbols));
  row->Add(symbols);
  return input;
}

void AddAnswer(const std::vector<int64_t>& answer, ProblemRow* row) {
  for (const int64_t symbol : answer) row->Add(symbol, /*answers=*/true);
}

// The number of tokens in a row whose answer is as long as its input.
int64_t Twice(int64_t length) { return 2 * length + 1; }

void MakeCopy(int64_t symbols, int64_t length, Draws* draws, ProblemRow* row) {
  AddAnswer(DrawInput(symbols, length, draws, row), row);
}

void MakeReverse(int64_t symbols, int64_t length, Draws* draws, ProblemRow* row) {
  std::vector<int64_t> input = DrawInput(symbols, length, draws, row);
  std::reverse(input.begin(), input.end());
  AddAnswer(input, row);
}

void MakeSort(int64_t symbols, int64_t length, Draws* draws, ProblemRow* row) {
  std::vector<int64_t> input = DrawInput(symbols, length, draws, row);
  std::sort(input.begin(), input.end());
  AddAnswer(input, row);
}

int64_t OneMore(int64_t length) { return length + 2; }

// The answer is the sum of the input modulo the number of symbols. With two symbols, it is the
// parity.
void MakeSum(int64_t symbols, int64_t length, Draws* draws, ProblemRow* row) {
  int64_t sum = 0;
  for (const int64_t symbol : DrawInput(symbols, length, draws, row)) sum += symbol;
  AddAnswer({sum % symbols}, row);
}

// The input is a stack from bottom to top, followed by actions. The answer is the resulting stack
// from top to bottom, followed by an end token. Tokens `symbols` to 2 * `symbols` are the actions:
// a push for each symbol, followed by pop.
std::vector<std::string> StackWords(int64_t symbols) {
  std::vector<std::string> words = Numbered("", symbols);
  for (std::string& word : Numbered("push", symbols)) words.push_back(std::move(word));
  words.insert(words.end(), {"pop", "end", "="});
  return words;
}

int64_t StackTokens(int64_t length) { return 2 * length + 2; }

void MakeStack(int64_t symbols, int64_t length, Draws* draws, ProblemRow* row) {
  const int64_t pop = 2 * symbols;
  const int64_t end = pop + 1;
  const int64_t mark = end + 1;
  std::vector<int64_t> stack(1 + draws->Below(length));
  for (int64_t& symbol : stack) row->Add(symbol = draws->Below(symbols));
  for (auto left = length - static_cast<int64_t>(stack.size()); left > 0; --left) {
    const int64_t action = draws->Below(symbols + 1);
    row->Add(symbols + action);
    if (action < symbols) {
      stack.push_back(action);
    } else if (!stack.empty()) {
      stack.pop_back();
    }
  }
  row->Add(mark);
  std::reverse(stack.begin(), stack.end());
  stack.push_back(end);
  AddAnswer(stack, row);
}

// The input consists of key-value pairs. After the mark, all keys are repeated in random order,
// each followed by its value, which is the answer. Tokens [symbols, 2 * symbols) are the values.
std::vector<std::string> RecallWords(int64_t symbols) {
  std::vector<std::string> words = Numbered("k", symbols);
  for (std::string& word : Numbered("v", symbols)) words.push_back(std::move(word));
  words.emplace_back("=");
  return words;
}

int64_t Pairs(int64_t length) { return (length + 1) / 2; }
int64_t RecallTokens(int64_t length) { return 4 * Pairs(length) + 1; }
int64_t LongestRecall(int64_t symbols) { return 2 * symbols; }

void Shuffle(std::vector<int64_t>* values, int64_t first, Draws* draws) {
  const auto size = static_cast<int64_t>(values->size());
  for (int64_t n = 0; n < first; ++n) {
    std::swap((*values)[n], (*values)[n + draws->Below(size - n)]);
  }
}

void MakeRecall(int64_t symbols, int64_t length, Draws* draws, ProblemRow* row) {
  const int64_t pairs = Pairs(length);
  std::vector<int64_t> keys(symbols);
  for (int64_t n = 0; n < symbols; ++n) keys[n] = n;
  Shuffle(&keys, pairs, draws);
  std::vector<int64_t> values(pairs);
  std::vector<int64_t> order(pairs);
  for (int64_t n = 0; n < pairs; ++n) {
    order[n] = n;
    values[n] = symbols + draws->Below(symbols);
    row->Add(keys[n]);
    row->Add(values[n]);
  }
  row->Add(2 * symbols);
  Shuffle(&order, pairs, draws);
  for (const int64_t n : order) {
    row->Add(keys[n]);
    row->Add(values[n], /*answers=*/true);
  }
}

}  // namespace

Draws::Draws(uint32_t purpose, int64_t seed, int64_t step) {
  std::vector<uint32_t> words = {purpose};
  for (const int64_t number : {seed, step}) {
    const auto bits = static_cast<uint64_t>(number);
    words.push_back(static_cast<uint32_t>(bits));
    words.push_back(static_cast<uint32_t>(bits >> 32));
  }
  std::seed_seq sequence(words.begin(), words.end());
  generator_.seed(sequence);
}

// The modulo bias is below count / 2^64.
int64_t Draws::Below(int64_t count) {
  return static_cast<int64_t>(generator_() % static_cast<uint64_t>(count));
}

void ProblemRow::Add(int64_t token, bool answers) {
  tokens.push_back(token);
  is_answer.push_back(answers);
}

const std::vector<Problem>& Problems() {
  static const std::vector<Problem> problems = {
      {"bucket-sort", "the input in sorted order, with few symbols", 5, 2, kManySymbols, Symbols,
       Twice, Any, MakeSort},
      {"copy", "the input repeated", 2, 2, kManySymbols, Symbols, Twice, Any, MakeCopy},
      {"modular-addition", "the sum of the input modulo the number of symbols", 5, 2, kManySymbols,
       Symbols, OneMore, Any, MakeSum},
      {"parity", "whether the number of ones is odd", 2, 2, 2, Symbols, OneMore, Any, MakeSum},
      {"recall", "the values of queried keys from key-value pairs in the input", 256, 1,
       kManySymbols, RecallWords, RecallTokens, LongestRecall, MakeRecall},
      {"reverse", "the input in reverse", 2, 2, kManySymbols, Symbols, Twice, Any, MakeReverse},
      {"sort", "the input in sorted order", 100, 2, kManySymbols, Symbols, Twice, Any, MakeSort},
      {"stack", "the contents of a stack after pushes and pops", 2, 2, kManySymbols, StackWords,
       StackTokens, Any, MakeStack},
  };
  return problems;
}

std::vector<std::string> ProblemNames() {
  std::vector<std::string> names;
  for (const Problem& problem : Problems()) names.emplace_back(problem.name);
  return names;
}

const Problem& FindProblem(const std::string& name) {
  for (const Problem& problem : Problems()) {
    if (problem.name == name) return problem;
  }
  throw Error(StrCat("--problem is '", name, "'; expected one of ", Join(ProblemNames(), ", ")));
}

ProblemRows MakeRows(const Problem& problem, int64_t symbols, int64_t length, int64_t count,
                     Draws* draws) {
  const int64_t tokens = problem.tokens(length);
  const auto mark = static_cast<int64_t>(problem.vocabulary(symbols).size()) - 1;
  ProblemRows rows = {.tokens = torch::full({count, tokens}, mark, torch::kLong),
                      .is_answer = torch::zeros({count, tokens}, torch::kBool)};
  auto* out = rows.tokens.mutable_data_ptr<int64_t>();
  bool* answers = rows.is_answer.mutable_data_ptr<bool>();
  for (int64_t n = 0; n < count; ++n) {
    ProblemRow row;
    problem.make(symbols, length, draws, &row);
    std::copy(row.tokens.begin(), row.tokens.end(), out + n * tokens);
    std::copy(row.is_answer.begin(), row.is_answer.end(), answers + n * tokens);
  }
  return rows;
}

// Knuth, The Art of Computer Programming, section 3.4.2, algorithm S.
torch::Tensor RandomSubsets(int64_t limit, int64_t size, int64_t count, Draws* draws) {
  torch::Tensor subsets = torch::empty({count, size}, torch::kLong);
  auto* out = subsets.mutable_data_ptr<int64_t>();
  for (int64_t row = 0; row < count; ++row) {
    int64_t missing = size;
    for (int64_t number = 0; missing > 0; ++number) {
      if (draws->Below(limit - number) >= missing) continue;
      *out++ = number;
      --missing;
    }
  }
  return subsets;
}

}  // namespace gnomon::lab
