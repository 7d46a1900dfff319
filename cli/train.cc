#include <cmath>
#include <iostream>
#include <memory>
#include <string>

#include "cli/checks.h"
#include "cli/commands.h"
#include "cli/flags.h"
#include "cli/interrupts.h"
#include "cli/program.h"
#include "cli/progress.h"
#include "cli/run_folder.h"
#include "cli/shortage.h"
#include "gnomon/attention.h"
#include "models/checkpoint.h"
#include "models/evaluation.h"
#include "models/trainer.h"
#include "training/strings.h"

namespace gnomon::cli {
namespace {

using models::StrCat;

struct TrainFlags {
  std::string data;
  std::string out;
  std::string resume;
  models::LanguageModelOptions model;
  models::TrainingOptions training;
  models::TokenOptions tokens;
  models::RunOptions run;
  int64_t threads = 0;
};

struct Work {
  std::unique_ptr<models::Trainer> trainer;
  models::TextData data;
  models::TokenData tokens;
  std::filesystem::path checkpoint;
  models::FolderLock lock;  // of its folder; process 0 has it
  models::RunOptions run;
};

void CheckText(const Work& work, const models::TrainingOptions& training) {
  CheckTextHolds(work.data, work.tokens, models::NeededTokens(training), training.length + 1);
}

// The vocabulary that process 0 learns, in all of them. `work` has the text.
models::TokenizerPtr ShareTokenizer(const models::Processes& processes, const TrainFlags& flags,
                                    const Work& work) {
  models::TokenizerPtr tokenizer;
  Together(processes, [&] {
    if (processes.rank() == 0) {
      tokenizer = models::BuildTokenizer(flags.tokens, work.data.train);
    }
  });
  if (processes.size() == 1) return tokenizer;
  const std::string vocabulary =
      processes.BroadcastText(tokenizer == nullptr ? "" : tokenizer->vocabulary());
  return processes.rank() == 0 ? tokenizer : models::ReadTokenizer(flags.tokens.kind, vocabulary);
}

void CheckSameText(const models::Processes& processes, const Work& work) {
  const std::string sha256 = processes.BroadcastText(work.data.sha256);
  Together(processes, [&] {
    if (work.data.sha256 == sha256) return;
    throw Error(StrCat("the text at ", work.data.path, " of process ", processes.rank(),
                       " is not that of process 0"));
  });
}

// Everything that can be wrong is found here, before the first step.
Work NewWork(const CLI::App& command, TrainFlags flags, const models::ProcessesPtr& processes) {
  Work work;
  Together(*processes, [&] {
    if (flags.data.empty()) throw Error("train: --data is required");
    SetWarmup(command, &flags.training);
    flags.model.max_length = flags.training.length;
    models::CheckTrainingOptions(flags.training, processes->size());
    models::CheckTokenOptions(flags.tokens);
    // With any vocabulary: learning one may take minutes.
    BuildModel(flags.model, flags.training.seed, flags.training.memory);
    work.data = models::ReadText(flags.data);
  });
  CheckSameText(*processes, work);
  const models::TokenizerPtr tokenizer = ShareTokenizer(*processes, flags, work);
  Together(*processes, [&] {
    work.tokens = models::Tokenize(tokenizer, work.data);
    CheckText(work, flags.training);
    flags.model.vocabulary = tokenizer->size();
    CheckTrainingFits(flags.model, flags.training, processes->size());
    if (processes->rank() == 0) {
      RunFolder folder = CreateRunFolder(flags.out, NameOfData(flags.data));
      work.checkpoint = folder.path / kCheckpointName;
      work.lock = std::move(folder.lock);
    }
  });
  work.run = flags.run;
  work.trainer =
      std::make_unique<models::Trainer>(models::NewModel(flags.model, flags.training.seed),
                                        work.tokens.train, flags.training, processes);
  return work;
}

Work ResumedWork(const CLI::App& command, const TrainFlags& flags,
                 const models::ProcessesPtr& processes) {
  Work work;
  models::Checkpoint checkpoint;
  Together(*processes, [&] {
    work.checkpoint = CheckpointFile(flags.resume);
    if (processes->rank() == 0) {
      work.lock = models::FolderLock(models::FolderOf(work.checkpoint));
      models::RemoveUnfinished(work.checkpoint);
    }
    checkpoint = models::LoadCheckpoint(work.checkpoint);
    if (!checkpoint.training) {
      throw Error(StrCat(work.checkpoint.string(),
                         " holds a model alone; --resume needs its training, too: optimizer, "
                         "step, options and data"));
    }
    const models::TrainingState& training = *checkpoint.training;
    models::CheckTrainingOptions(training.options, processes->size());
    CheckTrainingFits(checkpoint.model->options(), training.options, processes->size());
    work.data = models::ReadText(training.data_path);
    if (work.data.sha256 != training.data_sha256) {
      throw Error(StrCat("the text at ", training.data_path, " is not what the run began with"));
    }
    work.tokens = models::Tokenize(checkpoint.tokenizer, work.data);
    CheckText(work, training.options);
    work.run = training.run;
    if (command.count("--checkpoint-every") > 0) {
      work.run.checkpoint_every = flags.run.checkpoint_every;
    }
    if (command.count("--evaluation-bytes") > 0) {
      work.run.evaluation_bytes = flags.run.evaluation_bytes;
    }
  });
  const models::TrainingState& training = *checkpoint.training;
  work.trainer = std::make_unique<models::Trainer>(checkpoint.model, work.tokens.train,
                                                   training.options, processes);
  work.trainer->Restore(training.optimizer, training.step, training.memory);
  return work;
}

int Run(const CLI::App& command, const TrainFlags& flags, const models::ProcessesPtr& processes) {
  Together(*processes, [&] {
    if (flags.resume.empty()) return;
    CheckStandsAlone(command, "--resume",
                     {"--threads", "--checkpoint-every", "--evaluation-bytes", "--terms"});
  });
  SetThreads(flags.threads);
  Work work = flags.resume.empty() ? NewWork(command, flags, processes)
                                   : ResumedWork(command, flags, processes);
  models::Trainer& trainer = *work.trainer;
  const models::Tokenizer& tokenizer = *work.tokens.tokenizer;
  const std::string unit = models::TokenUnit(tokenizer.kind());
  const auto save = [&] {
    Together(*processes, [&] {
      models::SaveCheckpoint(work.checkpoint, trainer, work.data, tokenizer, work.run);
    });
  };
  save();
  CatchInterrupts();
  Progress progress(/*shown=*/processes->rank() == 0);
  const int64_t steps = trainer.options().steps;
  const int64_t first = trainer.step();
  progress.Note(StrCat(trainer.model()->CountParameters(), " parameters, ",
                       work.tokens.train.size(), " ", tokenizer.kind(), " to train on, steps ",
                       first, " to ", steps));
  const std::string batch =
      StrCat("--batch ", trainer.options().batch, " and --length ", trainer.options().length);
  const Stopwatch clock;
  double smooth = 0;
  while (trainer.step() < steps && !processes->Any(Interrupted())) {
    double loss = 0;
    NamingOptions(batch, [&] { loss = trainer.Step(); });
    if (!std::isfinite(loss)) {
      Together(*processes, [&] {
        throw std::runtime_error(StrCat("the loss became ", loss, " at step ", trainer.step(), "; ",
                                        work.checkpoint.string(),
                                        " is from before (a lower --learning-rate may help)"));
      });
    }
    const int64_t done = trainer.step() - first;
    smooth = done == 1 ? loss : 0.9 * smooth + 0.1 * loss;
    progress.Update(StrCat(
        "step ", trainer.step(), " of ", steps, ", loss ", FormatLoss(smooth), " nats per ", unit,
        ", ",
        TimeLeft(clock.seconds(), static_cast<double>(done), static_cast<double>(steps - first))));
    if (trainer.step() % work.run.checkpoint_every == 0) save();
  }
  save();
  if (trainer.step() < steps) {
    progress.Note(StrCat("stopped after step ", trainer.step(), " of ", steps,
                         "; resume with: gnomon train --resume ",
                         work.checkpoint.parent_path().string()));
    return kInterrupted;
  }
  if (processes->rank() != 0) return 0;
  const std::vector<models::LengthLoss> losses =
      models::Evaluate(trainer.model(), work.tokens.valid, {trainer.options().length},
                       models::TokensOfBytes(work.tokens.valid, work.run.evaluation_bytes),
                       trainer.options().memory, [] { return !Interrupted(); });
  if (losses.empty()) return kInterrupted;
  progress.Note(StrCat("saved ", work.checkpoint.string()));
  std::cout << "validation loss at length " << losses[0].length << ": "
            << FormatLoss(losses[0].loss) << " nats per " << unit << ", "
            << FormatLoss(losses[0].bits_per_byte) << " bits per byte\n";
  return 0;
}

}  // namespace

void AddTrain(CLI::App& app, const models::ProcessesPtr& processes, Action* action) {
  CLI::App* command = app.add_subcommand(
      "train", "Train a language model over bytes, words or subwords and save it");
  command->footer(
      "On several processes: torchrun --nproc-per-node N -m gnomon train ... They share the "
      "windows "
      "of each step and give the result of one process. Each of them reads the data, and the "
      "checkpoint to resume; one of them writes checkpoints. Checkpoints are interchangeable: any "
      "number of processes can resume the run.");
  auto flags = std::make_shared<TrainFlags>();
  flags->training.length = kTrainingLength;
  command->add_option("--data", flags->data,
                      "A text file, or a folder of text files; the last tenth is for validation "
                      "unless the folder has parts called train and valid");
  command->add_option("--out", flags->out,
                      "Folder for the checkpoint; default runs/<date>-<time>-<name of the data>");
  command->add_option(
      "--resume", flags->resume,
      "Resume the run in this folder with its own settings; only --checkpoint-every and "
      "--evaluation-bytes may be changed");
  AddFlags(command, flags->run.Options());
  AddThreadsFlag(command, &flags->threads);
  AddFlags(command, flags->tokens.Options());
  AddFlags(command, flags->model.Options(), "Model");
  AddFlags(command, flags->training.Options(), "Training");
  command->callback([action, command, flags, processes] {
    *action = [command, flags, processes] { return Run(*command, *flags, processes); };
  });
}

}  // namespace gnomon::cli
