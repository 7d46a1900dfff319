// Memory that there is not, told in words of the options.
#ifndef GNOMON_CLI_SHORTAGE_H_
#define GNOMON_CLI_SHORTAGE_H_

#include <exception>
#include <functional>
#include <optional>
#include <string>

namespace gnomon::cli {

// ": it would allocate 512 bytes", or nothing more, if an exception is that of an allocator; none
// if it is another one.
std::optional<std::string> DescribeShortage(const std::exception& error);

// Does work whose need of memory `options` set ("--batch 9 and --length 8"); where there is not
// enough, throws an Error that names them.
void NamingOptions(const std::string& options, const std::function<void()>& work);

}  // namespace gnomon::cli

#endif  // GNOMON_CLI_SHORTAGE_H_
