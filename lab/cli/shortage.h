// Reports out-of-memory errors in terms of the options that cause them.
#ifndef GNOMON_CLI_SHORTAGE_H_
#define GNOMON_CLI_SHORTAGE_H_

#include <exception>
#include <functional>
#include <optional>
#include <string>

namespace gnomon::lab::cli {

// For an allocation failure, returns ": failed to allocate 512 bytes" (an example), or "" if the
// size is unknown. Returns nothing for other exceptions.
std::optional<std::string> DescribeShortage(const std::exception& error);

// Runs `work`, whose memory use depends on `options`, such as "--batch 9 and --length 8". If memory
// runs out, throws an Error that names these options.
void NamingOptions(const std::string& options, const std::function<void()>& work);

}  // namespace gnomon::lab::cli

#endif  // GNOMON_CLI_SHORTAGE_H_
