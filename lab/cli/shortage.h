// Reports memory shortage in terms of the options that cause it.
#ifndef GNOMON_CLI_SHORTAGE_H_
#define GNOMON_CLI_SHORTAGE_H_

#include <exception>
#include <functional>
#include <optional>
#include <string>

namespace gnomon::cli {

// For an allocation failure, ": it would allocate 512 bytes" or an empty string; none for other
// exceptions.
std::optional<std::string> DescribeShortage(const std::exception& error);

// Does work whose memory depends on `options` ("--batch 9 and --length 8"); on a shortage, throws
// an Error that names them.
void NamingOptions(const std::string& options, const std::function<void()>& work);

}  // namespace gnomon::cli

#endif  // GNOMON_CLI_SHORTAGE_H_
