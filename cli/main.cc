#include <memory>

#include "cli/program.h"

int main(int argc, char** argv) {
  return gnomon::cli::RunProgram(argc, argv, std::make_shared<gnomon::models::Processes>());
}
