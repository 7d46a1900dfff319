#include "ops/operators/token_map_cuda.h"

#include <ATen/ATen.h>

#include <vector>

#include "cuda/token_map.h"
#include "ops/operators/cuda_stream.h"
#include "ops/operators/kernel_arguments.h"

namespace gnomon {
namespace {

TokenType TypeOf(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kBFloat16 ? TokenType::kBFloat16
         : tensor.scalar_type() == at::kHalf   ? TokenType::kFloat16
                                               : TokenType::kFloat32;
}

// Describes tensors to the kernels, and keeps copies of tensors that must have other strides.
class TokenMapArrays {
 public:
  cuda::TokenMapCall Call(const std::array<TokenMapTensors, 2>& sides,
                          const std::optional<ConeMap>& cone, bool back) {
    cuda::TokenMapCall call;
    call.cone = cone;
    call.map.back = back ? 1 : 0;
    for (size_t n = 0; n < sides.size(); ++n) {
      const TokenMapTensors& from = sides[n];
      if (!from.tokens.defined() || from.tokens.numel() == 0) continue;
      call.batch = from.tokens.size(0);
      call.tokens = TypeOf(from.tokens);
      cuda::TokenMapSide& to = call.map.sides[n];
      to.columns = static_cast<int>(from.tokens.size(3));
      to.heads = static_cast<int>(from.tokens.size(1));
      to.rows = static_cast<int>(from.tokens.size(2));
      to.tokens = Rows(from.tokens);
      if (from.d_tokens.defined()) to.d_tokens = Rows(from.d_tokens);
      if (from.mapped.defined()) {
        call.mapped = TypeOf(from.mapped);
        to.width = static_cast<int>(from.mapped.size(3));
        to.mapped = Rows(from.mapped);
      }
      if (from.scalars.defined()) {
        to.scalars = const_cast<float*>(Keep(from.scalars.contiguous()).const_data_ptr<float>());
      }
      if (from.d_turns.cosine.defined()) {
        to.d_cosines = Keep(from.d_turns.cosine).data_ptr<float>();
        to.d_sines = Keep(from.d_turns.sine).data_ptr<float>();
      }
      const PendingRotation& rotation = from.rotation;
      if (!rotation.exists()) continue;
      call.turns = rotation.block == 0 ? cuda::TokenMapCall::Turns::kAdjacent
                                       : cuda::TokenMapCall::Turns::kHalves;
      to.turn_block = static_cast<int>(rotation.block);
      to.turned = static_cast<int>(2 * rotation.turns.cosine.size(-1));
      to.cosines = Broadcast(rotation.turns.cosine);
      to.sines = Broadcast(rotation.turns.sine);
    }
    return call;
  }

 private:
  const at::Tensor& Keep(const at::Tensor& tensor) { return kept_.emplace_back(tensor); }

  cuda::Array Rows(const at::Tensor& given) {
    const at::Tensor& tensor = Keep(WithRows(given));
    return {const_cast<void*>(tensor.const_data_ptr()),
            {tensor.stride(0), tensor.stride(1), tensor.stride(2)}};
  }

  // Missing axes and axes of size 1 have stride 0.
  cuda::Array Broadcast(const at::Tensor& given) {
    const at::Tensor& tensor = Keep(WithRows(given));
    cuda::Array array{const_cast<void*>(tensor.const_data_ptr()), {0, 0, 0}};
    const int64_t lacking = 4 - tensor.dim();
    for (int64_t axis = lacking; axis < 3; ++axis) {
      if (tensor.size(axis - lacking) != 1) array.stride[axis] = tensor.stride(axis - lacking);
    }
    return array;
  }

  std::vector<at::Tensor> kept_;
};

void Launch(const char* operation, const std::array<TokenMapTensors, 2>& sides,
            const std::optional<ConeMap>& cone, bool back, decltype(cuda::MapTokens)* launch) {
  TokenMapArrays arrays;
  const cuda::TokenMapCall call = arrays.Call(sides, cone, back);
  const at::Tensor& on = sides[0].tokens.defined() ? sides[0].tokens : sides[1].tokens;
  RunOnCudaStream(operation, on, [&](cuda::Backend& backend) { launch(call, backend); });
}

}  // namespace

bool HasTokenMapKernel(at::ScalarType type) {
  return type == at::kFloat || type == at::kBFloat16 || type == at::kHalf;
}

void MapTokensOnGpu(const char* operation, const std::array<TokenMapTensors, 2>& sides,
                    const std::optional<ConeMap>& cone, bool back) {
  Launch(operation, sides, cone, back, cuda::MapTokens);
}

void MapTokensBackwardOnGpu(const char* operation, const std::array<TokenMapTensors, 2>& sides,
                            const std::optional<ConeMap>& cone, bool back) {
  Launch(operation, sides, cone, back, cuda::MapTokensBackward);
}

}  // namespace gnomon
