// Ctrl-C as a question that work under way asks.
#ifndef GNOMON_CLI_INTERRUPTS_H_
#define GNOMON_CLI_INTERRUPTS_H_

namespace gnomon::cli {

// From now on a first Ctrl-C (or SIGTERM) only sets Interrupted(); a second one kills.
void CatchInterrupts();
bool Interrupted();

}  // namespace gnomon::cli

#endif  // GNOMON_CLI_INTERRUPTS_H_
