#include <cmath>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cli/checks.h"
#include "cli/commands.h"
#include "cli/flags.h"
#include "cli/interrupts.h"
#include "cli/program.h"
#include "cli/progress.h"
#include "cli/results.h"
#include "cli/run_folder.h"
#include "cli/shortage.h"
#include "gnomon/attention.h"
#include "training/checkpoint.h"
#include "training/device.h"
#include "training/strings.h"
#include "training/task.h"
#include "training/trainer.h"

namespace gnomon::lab::cli {
namespace {

struct TrainFlags {
  std::string task = kTextTask;
  std::string data;
  std::string out;
  std::string resume;
  Terms terms;
  TrainingOptions training;
  RunOptions run;
  std::string device = "cpu";
  int64_t threads = 0;
};

// The options that may change when a run is resumed.
OptionList RunFlags(TrainFlags* flags, TaskOptions& task) {
  return InSection("run", flags->run.Options()) + task.Options(Command::kTrain);
}

struct Work {
  std::unique_ptr<Trainer> trainer;
  Terms terms;
  std::string data;
  std::filesystem::path checkpoint;
  FolderLock lock;  // locks the folder; held by process 0
  RunOptions run;
};

// Learns the assets from the data in process 0, and broadcasts them to the other processes.
void ShareAssets(const Processes& processes, TaskData& task) {
  RunInEveryProcess(processes, [&] {
    if (processes.rank() == 0) task.Prepare();
  });
  if (processes.size() == 1) return;
  std::vector<std::string> bytes;
  for (const Asset& asset : task.Assets()) {
    bytes.push_back(processes.BroadcastText(asset.bytes));
  }
  if (processes.rank() != 0) task.TakeAssets(bytes, /*is_stored=*/false);
}

void CheckSameData(const Processes& processes, const Task& task, const std::string& path) {
  const std::string sha256 = processes.BroadcastText(task.data_sha256());
  RunInEveryProcess(processes, [&] {
    if (task.data_sha256() == sha256) return;
    throw Error(StrCat("the ", task.description().data_noun, " at ", path, " in process ",
                       processes.rank(), " differs from the one in process 0"));
  });
}

// Throws Error if the device does not exist, or if it is not the CPU and several processes would
// share it.
torch::Device DeviceOf(const TrainFlags& flags, const Processes& processes) {
  const torch::Device device = FindDevice(flags.device);
  if (!device.is_cpu() && processes.size() > 1) {
    throw Error(StrCat("train: --device ", flags.device, " works with only one process, but ",
                       processes.size(), " were started"));
  }
  return device;
}

// Runs all checks, and prepares the run up to its first step.
Work NewWork(const CLI::App& command, TrainFlags flags, Task& task, const ProcessesPtr& processes) {
  Work work;
  TrainingOptions& training = flags.training;
  torch::Device device(torch::kCPU);
  RunInEveryProcess(*processes, [&] {
    device = DeviceOf(flags, *processes);
    if (task.description().takes_data() && flags.data.empty()) {
      throw Error("train: --data is required");
    }
    SetWarmup(command, &training);
    CheckTrainingOptions(training, processes->size());
    task.Settle(Command::kTrain, /*is_resumed=*/false, &training);
    CheckRanges(task.Options(Command::kTrain), "");
    task.ReadData(flags.data);
    flags.terms = CompleteTerms(task, flags.terms);
    // Check the terms before learning the assets, which may take minutes.
    CheckTerms(task, flags.terms, training, Command::kTrain, device);
  });
  CheckSameData(*processes, task, flags.data);
  ShareAssets(*processes, task);
  RunInEveryProcess(*processes, [&] {
    task.CheckData(&training);
    task.CheckFits(training, processes->size());
    if (processes->rank() == 0) {
      RunFolder folder =
          CreateRunFolder(flags.out, flags.data.empty() ? task.name() : NameOfData(flags.data));
      work.checkpoint = folder.path / lab::kCheckpointName;
      work.lock = std::move(folder.lock);
    }
  });
  work.terms = flags.terms;
  work.data = flags.data;
  work.run = flags.run;
  work.trainer = std::make_unique<Trainer>(NewLearner(task, flags.terms, training, device),
                                           training, processes);
  return work;
}

Work ResumedWork(CLI::App& command, TrainFlags* flags, Task& task, const ProcessesPtr& processes) {
  Work work;
  Checkpoint checkpoint;
  RunInEveryProcess(*processes, [&] {
    const torch::Device device = DeviceOf(*flags, *processes);
    work.checkpoint = CheckpointFile(flags->resume);
    if (processes->rank() == 0) {
      work.lock = FolderLock(FolderOf(work.checkpoint));
      RemoveUnfinished(work.checkpoint);
    }
    checkpoint = LoadModel(work.checkpoint.string(), task, device);
    if (!checkpoint.training) {
      throw Error(StrCat(work.checkpoint.string(),
                         " contains only a model; --resume also needs its training state "
                         "(optimizer, step, options and data)"));
    }
    const TrainingState& training = *checkpoint.training;
    CheckTrainingOptions(training.options, processes->size());
    task.CheckFits(training.options, processes->size());
    task.ReadData(training.data_path);
    if (task.data_sha256() != training.data_sha256) {
      throw Error(StrCat("the ", task.description().data_noun, " at ", training.data_path,
                         " has changed since this run started"));
    }
    flags->run = training.run;
    SetAgain(command, RunFlags(flags, task));
    task.Settle(Command::kTrain, /*is_resumed=*/true, &training.options);
    task.CheckData(&training.options);
  });
  const TrainingState& training = *checkpoint.training;
  work.terms = checkpoint.terms;
  work.data = training.data_path;
  work.run = flags->run;
  work.trainer =
      std::make_unique<Trainer>(std::move(checkpoint.learner), training.options, processes);
  work.trainer->Restore(training.optimizer, training.step, training.learner);
  return work;
}

// Prints a line such as "validation at length 128: 1.234 (loss, nats per byte), ..." for each
// condition.
void PrintMeasurements(const TaskResults& task, const std::vector<Measurement>& measurements) {
  const std::vector<Metric> metrics = task.metrics();
  const auto is_known = [&](size_t n) {
    return std::any_of(measurements.begin(), measurements.end(),
                       [&](const Measurement& at) { return at.values[n].has_value(); });
  };
  for (const Measurement& at : measurements) {
    std::vector<std::string> parts;
    for (size_t n = 0; n < metrics.size(); ++n) {
      // Some metrics exist only for one condition.
      if (!at.values[n] && is_known(n)) continue;
      parts.push_back(StrCat(FormatLoss(at.values[n]), " (", metrics[n].title, ")"));
    }
    std::cout << "validation at " << task.conditions().key << " " << FormatCondition(at.condition)
              << ": " << Join(parts, ", ") << "\n";
  }
}

int Run(CLI::App& command, TrainFlags* flags, Task& task, const ProcessesPtr& processes) {
  RunInEveryProcess(*processes, [&] {
    if (flags->resume.empty()) return;
    CheckResumes(command, RunFlags(flags, task));
  });
  SetThreads(flags->threads);
  Work work = flags->resume.empty() ? NewWork(command, *flags, task, processes)
                                    : ResumedWork(command, flags, task, processes);
  Trainer& trainer = *work.trainer;
  const auto save = [&] {
    RunInEveryProcess(*processes, [&] {
      SaveCheckpoint(work.checkpoint, trainer, task, work.terms, work.run, work.data);
    });
  };
  save();
  CatchInterrupts();
  Progress progress(/*shown=*/processes->rank() == 0);
  const int64_t steps = trainer.options().steps;
  const int64_t first = trainer.step();
  progress.Note(StrCat(CountParameters(trainer.learner().module()), " parameters, ",
                       task.DescribeSize(), " of training data; steps ", first, " to ", steps));
  const std::string step_flags = task.StepFlags(Command::kTrain, trainer.options());
  const Stopwatch clock;
  double smooth = 0;
  while (trainer.step() < steps && !processes->Any(Interrupted())) {
    double loss = 0;
    NamingOptions(step_flags, [&] { loss = trainer.Step(); });
    if (!std::isfinite(loss)) {
      RunInEveryProcess(*processes, [&] {
        throw Error(StrCat("training diverged: the loss is ", loss, " at step ", trainer.step(),
                           "; ", work.checkpoint.string(),
                           " contains the last good checkpoint; try a lower --learning-rate"));
      });
    }
    const int64_t done = trainer.step() - first;
    smooth = done == 1 ? loss : 0.9 * smooth + 0.1 * loss;
    progress.Update(StrCat(
        "step ", trainer.step(), " of ", steps, ", loss ", FormatLoss(smooth), " ",
        task.description().loss_unit, ", ",
        TimeLeft(clock.seconds(), static_cast<double>(done), static_cast<double>(steps - first))));
    if (trainer.step() % work.run.checkpoint_every == 0) save();
  }
  save();
  if (trainer.step() < steps) {
    progress.Note(StrCat("stopped after step ", trainer.step(), " of ", steps, "; resume with: ",
                         ResumeLine(command, work.checkpoint.parent_path().string())));
    return kInterrupted;
  }
  if (processes->rank() != 0) return 0;
  std::vector<Measurement> measurements;
  NamingOptions(task.EvaluationFlags(Command::kTrain),
                [&] { measurements = trainer.learner().Evaluate([] { return !Interrupted(); }); });
  if (measurements.empty()) return kInterrupted;
  progress.Note(StrCat("saved ", work.checkpoint.string()));
  PrintMeasurements(task, measurements);
  return 0;
}

}  // namespace

void AddTrain(CLI::App& app, const std::shared_ptr<Task>& task, const ProcessesPtr& processes,
              Action* action) {
  CLI::App* command = app.add_subcommand(
      "train", "Train a model for a task, by default a language model, and save it");
  command->footer(
      "To use several processes, run: torchrun --nproc-per-node N -m gnomon train ... The "
      "processes split the examples of each step and produce the same result as one process. Each "
      "process reads the data, and the checkpoint when resuming; one process writes checkpoints. "
      "Any number of processes can resume a run.");
  auto flags = std::make_shared<TrainFlags>();
  flags->task = task->name();
  flags->training = task->DefaultTraining(Command::kTrain);
  AddTaskFlag(command, &flags->task);
  AddDataFlag(command, *task, &flags->data);
  AddFlags(command, flags->terms.Options());
  command->add_option("--out", flags->out,
                      "Folder for the checkpoint; default: runs/<date>-<time>-<name of the data>");
  command->add_option("--resume", flags->resume,
                      "Resume the run in this folder with its own settings; only options in the "
                      "Run group can be changed");
  AddDeviceFlag(command, &flags->device, "to train the model");
  AddThreadsFlag(command, &flags->threads);
  AddFlags(command,
           RunFlags(flags.get(), *task) + InSection("training", flags->training.Options()));
  command->callback([action, command, flags, task, processes] {
    *action = [command, flags, task, processes] {
      return Run(*command, flags.get(), *task, processes);
    };
  });
}

}  // namespace gnomon::lab::cli
