// The safetensors file format: an 8-byte little-endian length, a JSON header of that length, and
// the tensors' bytes (https://huggingface.co/docs/safetensors).
#ifndef GNOMON_TRAINING_SAFETENSORS_H_
#define GNOMON_TRAINING_SAFETENSORS_H_

#include <torch/torch.h>

#include <filesystem>
#include <map>
#include <string>

namespace gnomon::lab {

struct SafeTensors {
  std::map<std::string, torch::Tensor> tensors;  // contiguous, on the CPU
  std::map<std::string, std::string> metadata;
};

// Writes to a file next to `path` and renames it, so that `path` is never partially written. Throws
// Error on failure.
void WriteSafeTensors(const std::filesystem::path& path, const SafeTensors& content);

// Reads a file and validates its header completely; throws Error naming the file and the fault.
// Checks the size of each tensor against that of the file before allocating memory for it.
SafeTensors ReadSafeTensors(const std::filesystem::path& path);

// Reads only the metadata, without reading or checking the tensors. Throws Error naming the file
// and the fault.
std::map<std::string, std::string> ReadSafeTensorsMetadata(const std::filesystem::path& path);

}  // namespace gnomon::lab

#endif  // GNOMON_TRAINING_SAFETENSORS_H_
