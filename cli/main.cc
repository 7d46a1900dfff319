#include <c10/util/Exception.h>

#include <exception>
#include <iostream>
#include <string>

#include "build_info.h"
#include "cli/commands.h"
#include "cli/console.h"
#include "gnomon/attention.h"

namespace {

int Fail(int code, const std::string& message) {
  std::cerr << "gnomon: " << gnomon::cli::OneLine(message) << '\n';
  return code;
}

}  // namespace

int main(int argc, char** argv) {
  using namespace gnomon::cli;
  CLI::App app("gnomon: exact attention with any similarity, any position and any mask.");
  app.name("gnomon");
  app.require_subcommand(0, 1);
  app.set_version_flag("--version", std::string(GNOMON_VERSION));
  app.footer(
      "Exit codes: 0 done, 1 internal failure, 2 wrong input, 130 stopped by Ctrl-C (what is done "
      "is kept).");
  Action action;
  AddTrain(app, &action);
  AddEval(app, &action);
  AddGenerate(app, &action);
  AddCompare(app, &action);
  AddList(app, &action);
  AddInspect(app, &action);
  AddBench(app, &action);
  try {
    RememberCommand(argc, argv);
    app.parse(argc, argv);
    if (action == nullptr) throw gnomon::Error("which command? (--help lists what there is)");
    return action();
  } catch (const CLI::Success& asked) {
    return app.exit(asked);
  } catch (const CLI::ParseError& error) {
    return Fail(kWrongInput, std::string(error.what()) + " (--help lists what there is)");
  } catch (const gnomon::Error& error) {
    return Fail(kWrongInput, error.what());
  } catch (const c10::Error& error) {
    return Fail(kInternalFailure,
                std::string("internal failure: ") + error.what_without_backtrace());
  } catch (const std::exception& error) {
    return Fail(kInternalFailure, std::string("internal failure: ") + error.what());
  }
}
