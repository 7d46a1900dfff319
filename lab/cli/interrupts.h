// Turns Ctrl-C into a flag that long-running work polls.
#ifndef GNOMON_CLI_INTERRUPTS_H_
#define GNOMON_CLI_INTERRUPTS_H_

namespace gnomon::lab::cli {

// After this call, the first Ctrl-C (or SIGTERM) only sets Interrupted(); a second one kills the
// process.
void CatchInterrupts();
bool Interrupted();

}  // namespace gnomon::lab::cli

#endif  // GNOMON_CLI_INTERRUPTS_H_
