// Writing files that are never seen half written.
#ifndef GNOMON_MODELS_FILES_H_
#define GNOMON_MODELS_FILES_H_

#include <filesystem>
#include <string_view>
#include <vector>

namespace gnomon::models {

// Writes the parts one after the other to a file beside `path`, brings it to the disk, and renames
// it to `path`. Throws Error where it cannot.
void WriteFileAtomically(const std::filesystem::path& path,
                         const std::vector<std::string_view>& parts);

}  // namespace gnomon::models

#endif  // GNOMON_MODELS_FILES_H_
