// Tests the features that all tasks share, with the task `recall` of CONTRIBUTING.md. The task is
// only linked into this program; nothing refers to it.
#include "training/task.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "cli/program.h"
#include "gnomon/attention.h"
#include "lab/values.h"
#include "training/arrays.h"
#include "training/checkpoint.h"
#include "training/safetensors.h"
#include "training/trainer.h"

namespace gnomon::lab {
namespace {

using nlohmann::json;
using ::testing::Contains;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;

class TaskTest : public testing::Test {
 protected:
  TaskTest()
      : folder_(std::filesystem::path(testing::TempDir()) /
                (std::string("gnomon_task_") +
                 testing::UnitTest::GetInstance()->current_test_info()->name())) {
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
  }
  ~TaskTest() override { std::filesystem::remove_all(folder_); }

  std::string At(const char* name) const { return (folder_ / name).string(); }

  // Runs the program and captures its output in output_ and errors_.
  int Run(std::vector<std::string> words) {
    words.insert(words.begin(), "gnomon");
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    testing::internal::CaptureStdout();
    testing::internal::CaptureStderr();
    const int code = cli::RunProgram(static_cast<int>(words.size()), argv.data());
    output_ = testing::internal::GetCapturedStdout();
    errors_ = testing::internal::GetCapturedStderr();
    return code;
  }

  json Record(const std::string& folder) const {
    std::ifstream in(std::filesystem::path(folder) / "results.json");
    return json::parse(in);
  }

  std::filesystem::path folder_;
  std::string output_;
  std::string errors_;
};

TEST_F(TaskTest, AFileIsATask) {
  std::vector<std::string> names;
  for (const std::unique_ptr<Task>& task : AllTasks()) names.emplace_back(task->name());
  EXPECT_THAT(names, Contains("recall"));
  EXPECT_THAT(names, Contains("text"));
  EXPECT_TRUE(std::is_sorted(names.begin(), names.end()));
  try {
    NewTask("recal");
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("--task is 'recal'; did you mean recall? Expected"));
    EXPECT_THAT(error.what(), HasSubstr("recall, "));
  }
}

TEST_F(TaskTest, IsTrainedResumedAndEvaluatedByTheProgram) {
  const std::vector<std::string> train = {"train",  "--task",     "recall", "--steps",
                                          "40",     "--batch",    "64",     "--learning-rate",
                                          "0.02",   "--position", "alibi",  "--similarity",
                                          "umbral", "--lengths",  "4,9"};
  std::vector<std::string> words = train;
  words.insert(words.end(), {"--out", At("run")});
  ASSERT_EQ(Run(words), 0) << errors_;
  EXPECT_THAT(output_, ContainsRegex("validation at length 4: [01]\\.[0-9]+ \\(accuracy\\)\n"));
  EXPECT_THAT(output_, ContainsRegex("validation at length 9: [01]\\.[0-9]+ \\(accuracy\\)\n"));

  // The task and its options come from the checkpoint.
  ASSERT_EQ(Run({"eval", "--model", At("run"), "--json"}), 0) << errors_;
  const json stored = json::parse(output_);
  ASSERT_EQ(stored["losses"].size(), 2u);
  EXPECT_EQ(stored["losses"][1]["length"], 9);
  EXPECT_EQ(stored["losses"][1]["examples"], 256);
  EXPECT_EQ(stored["step"], 40);
  ASSERT_EQ(Run({"eval", "--model", At("run"), "--lengths", "4,30", "--json"}), 0) << errors_;
  const json longer = json::parse(output_);
  EXPECT_EQ(longer["losses"][0], stored["losses"][0]);
  EXPECT_EQ(longer["losses"][1]["length"], 30);
  ASSERT_EQ(Run({"eval", "--model", At("run")}), 0) << errors_;
  EXPECT_THAT(output_, HasSubstr("| length | accuracy | examples |"));

  // Resuming a finished run does nothing.
  ASSERT_EQ(Run({"train", "--resume", At("run"), "--checkpoint-every", "7"}), 0) << errors_;
  EXPECT_THAT(errors_, HasSubstr("steps 40 to 40"));

  EXPECT_EQ(Run({"generate", "--model", At("run")}), 2);
  EXPECT_THAT(
      errors_,
      HasSubstr("generate: the task 'recall' does not support generation; tasks that do: "));
  EXPECT_EQ(Run({"train", "--resume", At("run"), "--task", "text"}), 2);
  EXPECT_THAT(errors_, HasSubstr("it belongs to the task 'recall'; expected 'text'"));
}

TEST_F(TaskTest, IsComparedByTheProgram) {
  ASSERT_EQ(Run({"compare", "--task", "recall", "--steps", "5", "--batch", "8", "--lengths", "4,9",
                 "--position", "none,rope", "--run", "umbral/alibi", "--seeds", "2", "--dim", "8",
                 "--out", At("runs")}),
            0)
      << errors_;
  const json record = Record(At("runs"));
  EXPECT_EQ(record["status"], "finished");
  EXPECT_EQ(record["task"]["name"], "recall");
  EXPECT_EQ(record["task"]["conditions"]["values"], json({4, 9}));
  EXPECT_EQ(record["task"]["metrics"][0]["higher_is_better"], true);
  EXPECT_EQ(record["settings"]["model"]["dim"], 8);
  EXPECT_EQ(record["settings"]["lengths"], json({4, 9}));
  ASSERT_EQ(record["runs"].size(), 6u);
  for (const json& run : record["runs"]) {
    ASSERT_EQ(run["losses"].size(), 2u);
    const double accuracy = run["losses"][1]["accuracy"];
    EXPECT_GE(accuracy, 0);
    EXPECT_LE(accuracy, 1);
    EXPECT_EQ(run["curve"]["step"].back(), 5);
  }
  EXPECT_TRUE(record["summary"][0]["losses"][0]["accuracy"]["spread"].is_number());
  EXPECT_THAT(output_, HasSubstr("| accuracy at 4 | accuracy at 9 |"));
  EXPECT_THAT(output_, HasSubstr("over 2 seeds, trained for 5 steps of 8 examples. A dash marks a "
                                 "value that is undefined"));

  // The comparison continues where it stopped, with the same random numbers.
  json cut = record;
  cut["runs"].erase(4);
  std::ofstream(folder_ / "runs" / "results.json") << cut.dump();
  ASSERT_EQ(Run({"compare", "--resume", At("runs")}), 0) << errors_;
  const json again = Record(At("runs"));
  ASSERT_EQ(again["runs"].size(), 6u);
  EXPECT_EQ(again["runs"][4]["losses"], record["runs"][4]["losses"]);
  EXPECT_EQ(again["runs"][4]["curve"], record["runs"][4]["curve"]);
  EXPECT_EQ(again["sessions"].size(), 2u);
}

TEST_F(TaskTest, WrongWordsAreOneLine) {
  const auto refuse = [&](const std::vector<std::string>& words, const std::string& part) {
    EXPECT_EQ(Run(words), 2) << part;
    EXPECT_THAT(errors_, HasSubstr(part));
    EXPECT_EQ(std::count(errors_.begin(), errors_.end(), '\n'), 1) << errors_;
  };
  refuse({"train", "--task", "nothing"}, "--task is 'nothing'; expected");
  refuse({"train", "--task=nothing"}, "--task is 'nothing'; expected");
  refuse({"train", "--task", "recall", "--lengths", "4,0"},
         "--lengths contains 0; expected integers from 1 to");
  refuse({"train", "--task", "recall", "--dim", "1"}, "--dim is 1");
  refuse({"train", "--task", "recall", "--data", "x"}, "--data");
  refuse({"train", "--task", "recall", "--memory", "4"}, "--memory");
  refuse({"train", "--task", "recall", "--position", "bogus"}, "bogus");
  refuse({"compare", "--task", "recall", "--position", "rope,bogus"}, "bogus");
}

TEST_F(TaskTest, ResumesBitwise) {
  const std::unique_ptr<Task> task = NewTask("recall");
  const Terms terms = {"penumbral", "rope+cape"};
  TrainingOptions options;
  options.batch = 6;
  options.seed = 5;
  Trainer whole(NewLearner(*task, terms, options), options);
  Trainer half(NewLearner(*task, terms, options), options);
  for (int step = 0; step < 7; ++step) whole.Step();
  for (int step = 0; step < 4; ++step) half.Step();
  SaveCheckpoint(At("file"), half, *task, terms, {}, "");
  EXPECT_EQ(TaskOfCheckpoint(At("file")), "recall");
  const std::unique_ptr<Task> other = NewTask("recall");
  Checkpoint checkpoint = LoadCheckpoint(At("file"), *other);
  EXPECT_EQ(checkpoint.terms, terms);
  const TrainingState state = checkpoint.training.value();
  Trainer resumed(std::move(checkpoint.learner), state.options);
  resumed.Restore(state.optimizer, state.step, state.learner);
  for (int step = 4; step < 7; ++step) resumed.Step();
  EXPECT_TRUE(Equal(Values(whole.learner().module()), Values(resumed.learner().module())));

  // Loading compares the shapes of the model's parameters with those in the file.
  SafeTensors file = ReadSafeTensors(At("file"));
  json config = json::parse(file.metadata.at("gnomon"));
  config["model"]["dim"] = 1 << 20;
  file.metadata["gnomon"] = config.dump();
  WriteSafeTensors(At("file"), file);
  try {
    LoadCheckpoint(At("file"), *other);
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("'model.embedding.weight' is"));
  }
}

TEST_F(TaskTest, ShapesOfArraysAndPlacesInThemAreNamed) {
  SafeTensors file;
  file.tensors["train.images"] = torch::full({3, 2, 2}, 255, torch::kByte);
  file.tensors["train.labels"] = torch::tensor({0, 9, 10, 1}, torch::kInt);
  file.tensors["train.heights"] = torch::tensor({1.0f, std::nanf("")});
  file.tensors["train.notes"] = torch::arange(10).view({5, 2});
  file.tensors["train.notes_lengths"] = torch::tensor({2, 0, 3});
  file.tensors["train.few_lengths"] = torch::tensor({2, 0, 1});
  file.tensors["train.few"] = torch::arange(10).view({5, 2});
  WriteSafeTensors(At("file"), file);
  const Arrays arrays(At("file"));
  EXPECT_TRUE(torch::equal(arrays.Numbers("train.images", 3), torch::ones({3, 2, 2})));
  const std::vector<torch::Tensor> rows = arrays.Rows("train.notes", 2);
  ASSERT_EQ(rows.size(), 3u);
  EXPECT_EQ(rows[1].size(0), 0);
  EXPECT_TRUE(torch::equal(rows[2], torch::arange(4, 10).view({3, 2})));
  EXPECT_EQ(arrays.Integers("train.labels", 1, 0, 10).scalar_type(), torch::kLong);
  // Rows of equal length need no lengths.
  const std::vector<torch::Tensor> whole = arrays.Rows("train.images", 2);
  ASSERT_EQ(whole.size(), 3u);
  EXPECT_TRUE(torch::equal(whole[1], torch::full({2, 2}, 255, torch::kByte)));

  const auto expect = [&](const auto& read, const std::string& part) {
    try {
      read();
      ADD_FAILURE() << part;
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr(At("file")));
      EXPECT_THAT(error.what(), HasSubstr(part));
    }
  };
  expect([&] { arrays.Get("valid.images", 3); },
         "'valid.images' is missing; the file contains train.");
  expect([&] { arrays.Get("train.images", 4); }, "has shape [3, 2, 2]; expected 4 axes");
  expect([&] { arrays.Integers("train.labels", 1, 0, 9); }, "contains 10 at [2]; expected 0 to 9");
  expect([&] { arrays.Integers("train.heights", 1, 0, 9); }, "has dtype Float; expected integers");
  expect([&] { arrays.Numbers("train.heights", 1); }, "contains nan at [1]; expected finite");
  expect([&] { arrays.CheckRows("train.images", "train.labels"); }, "has 4 rows, but 'train.imag");
  expect([&] { arrays.Rows("train.few", 2); }, "sums to 3, but 'train.few' has 5");

  // The same data in a different file are recognised as unchanged.
  file.metadata["more"] = "words";
  WriteSafeTensors(At("file"), file);
  EXPECT_EQ(Arrays(At("file")).sha256(), arrays.sha256());
  file.tensors["train.images"][0][0][0] = 1;
  WriteSafeTensors(At("file"), file);
  EXPECT_NE(Arrays(At("file")).sha256(), arrays.sha256());
}

}  // namespace
}  // namespace gnomon::lab
