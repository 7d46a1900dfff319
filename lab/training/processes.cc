#include "training/processes.h"

#include <torch/torch.h>

#include <algorithm>
#include <exception>
#include <stdexcept>

#include "training/strings.h"

namespace gnomon::lab {
namespace {

// Calls a functional collective, which PyTorch provides for compiled graphs. Unlike process group
// classes, it is called by name, so this also links with PyTorch builds without torch.distributed.
// The call is boxed, because argument types differ between PyTorch versions.
torch::Tensor CallCollective(const char* name, torch::jit::Stack arguments) {
  const torch::NoGradGuard no_grad;
  c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
  const auto fail = [](const char* reason) {
    throw std::runtime_error(
        StrCat("torch.distributed: another process may have exited: ", reason));
  };
  try {
    dispatcher.findSchemaOrThrow(name, "").callBoxed(arguments);
    dispatcher.findSchemaOrThrow("_c10d_functional::wait_tensor", "").callBoxed(arguments);
  } catch (const c10::Error& error) {
    fail(error.what_without_backtrace());
  } catch (const std::exception& error) {
    fail(error.what());
  }
  return arguments[0].toTensor();
}

}  // namespace

at::Tensor Processes::AllGather(const at::Tensor& tensor) const { return tensor.unsqueeze(0); }

bool Processes::Any(bool here) const {
  const torch::Tensor count = torch::full({1}, here ? 1 : 0, torch::kLong);
  AllReduce(count);
  return count.item<int64_t>() > 0;
}

std::string Processes::BroadcastText(const std::string& text) const {
  const torch::Tensor size = torch::full({1}, static_cast<int64_t>(text.size()), torch::kLong);
  Broadcast(size);
  const torch::Tensor bytes = torch::zeros({size.item<int64_t>()}, torch::kByte);
  auto* data = reinterpret_cast<char*>(bytes.mutable_data_ptr<uint8_t>());
  if (rank() == 0) std::copy(text.begin(), text.end(), data);
  if (bytes.numel() > 0) Broadcast(bytes);
  return {data, static_cast<size_t>(bytes.numel())};
}

void ProcessGroup::AllReduce(const at::Tensor& tensor) const {
  CallCollective("_c10d_functional::all_reduce_", {tensor, std::string("sum"), name_});
}

at::Tensor ProcessGroup::AllGather(const at::Tensor& tensor) const {
  std::vector<int64_t> shape = tensor.sizes().vec();
  shape.insert(shape.begin(), size_);
  return CallCollective("_c10d_functional::all_gather_into_tensor",
                        {tensor.reshape({-1}), size_, name_})
      .view(shape);
}

void ProcessGroup::Broadcast(const at::Tensor& tensor) const {
  CallCollective("_c10d_functional::broadcast_", {tensor, int64_t{0}, name_});
}

int64_t FirstRow(int64_t batch, int64_t rank, int64_t size) {
  return batch / size * rank + batch % size * rank / size;
}

int64_t CountRows(int64_t batch, int64_t rank, int64_t size) {
  return FirstRow(batch, rank + 1, size) - FirstRow(batch, rank, size);
}

}  // namespace gnomon::lab
