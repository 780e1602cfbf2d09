// Ranks that are threads of one process run the launch under ThreadSanitizer. Exits 1 on a wrong epoch or a fault; the sanitizer makes its own
// exit code on a race.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "ffn.hip"

namespace {

using m3::Bits16;
using m3::Bits64;

struct Layer {
  std::vector<Bits16> post_norm, part, residual, out, residual_out;
  std::vector<float> router, bias;
  std::vector<m3::Bytes16> w13, s13, w2, s2;
};

constexpr m3::Sizes kSizes{3, 192, 64, 6, 2, M3_TEST_RANKS, 4};
constexpr int kGrid = M3_TEST_GRID;
constexpr int kLaunches = 6;
constexpr int kFlightLaunches = 4;

m3::ffn::Regions regions() {
  namespace protocol = m3::protocol;
  const int rows = kSizes.rows, hidden = kSizes.hidden, intermediate = kSizes.intermediate, experts = kSizes.experts, top_k = kSizes.top_k;
  const auto bytes = [](protocol::Bytes offset) { return static_cast<int>(offset); };
  return {bytes(protocol::x_ready_offset(rows, hidden)),
          bytes(protocol::logit_offset(rows, hidden)),
          bytes(protocol::route_offset(rows, hidden, experts)),
          bytes(protocol::intermediate_ready_offset(rows, hidden, experts, top_k)),
          bytes(protocol::stream_offset(rows, hidden, intermediate, experts, top_k)),
          bytes(protocol::x_offset(rows, hidden, intermediate, experts, top_k)),
          bytes(protocol::mid_offset(rows, hidden, intermediate, experts, top_k)),
          bytes(protocol::timeline_offset(rows, hidden, intermediate, experts, top_k))};
}

Bits16 bf16(float value) { return static_cast<Bits16>(m3::float_to_bf16(value)); }

Layer make_layer(bool packed, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Layer layer;
  const auto fill = [&](std::vector<Bits16>& values, int count, float scale) {
    for (int i = 0; i < count; ++i) values.push_back(bf16(normal(random) * scale));
  };
  const int matrices = kSizes.experts + 1, weights = matrices * 2 * kSizes.intermediate * kSizes.hidden;
  fill(layer.post_norm, kSizes.hidden, 0.1f);
  fill(layer.part, kSizes.rows * kSizes.hidden, 1.0f);
  fill(layer.residual, kSizes.rows * kSizes.hidden, 1.0f);
  layer.out.resize(layer.part.size());
  layer.residual_out.resize(layer.part.size());
  for (int i = 0; i < kSizes.experts * kSizes.hidden; ++i) layer.router.push_back(normal(random) * 0.1f);
  for (int i = 0; i < kSizes.experts; ++i) layer.bias.push_back(normal(random) * 0.1f);
  const auto fill_weights = [&](std::vector<m3::Bytes16>& values, int bytes) {
    values.resize(static_cast<std::size_t>((bytes + 15) / 16));
    unsigned char* byte = reinterpret_cast<unsigned char*>(values.data());
    for (int i = 0; i < bytes; ++i) byte[i] = static_cast<unsigned char>(random());
    if (packed) return;
    for (int i = 0; i < bytes / 2; ++i) reinterpret_cast<Bits16*>(byte)[i] = bf16(normal(random) * 0.1f);
  };
  const auto fill_scales = [&](std::vector<m3::Bytes16>& values, int rows, int k) {
    const int bytes = static_cast<int>(m3::protocol::round_up(rows, 256) * m3::protocol::round_up(k / 32, 8));
    values.resize(static_cast<std::size_t>(bytes / 16));
    for (int i = 0; i < bytes; ++i) reinterpret_cast<unsigned char*>(values.data())[i] = static_cast<unsigned char>(120 + random() % 6);
  };
  fill_weights(layer.w13, packed ? weights / 2 : weights * 2);
  fill_weights(layer.w2, packed ? weights / 4 : weights);
  fill_scales(layer.s13, matrices * 2 * kSizes.intermediate, kSizes.hidden);
  fill_scales(layer.s2, matrices * kSizes.hidden, kSizes.intermediate);
  return layer;
}

struct Rank {
  std::vector<Bits64> buffer, scratch, flight;
  std::vector<int> epoch_words;
  std::vector<long long> peers;
  Layer layer;
};

int run(bool packed) {
  std::vector<Rank> ranks(static_cast<std::size_t>(kSizes.world));
  std::vector<long long> addresses;
  for (int r = 0; r < kSizes.world; ++r) {
    Rank& rank = ranks[static_cast<std::size_t>(r)];
    rank.layer = make_layer(packed, static_cast<unsigned>(r));
    rank.buffer.resize(static_cast<std::size_t>(m3::protocol::peer_buffer_bytes(kSizes.world, kSizes.max_rows, kSizes.hidden) / 8));
    rank.scratch.resize(static_cast<std::size_t>(
        m3::protocol::scratch_bytes(kSizes.rows, kSizes.hidden, kSizes.intermediate, kSizes.experts, kSizes.top_k, 0) / 8 + 1));
    rank.flight.resize(static_cast<std::size_t>(m3::protocol::flight_bytes(kFlightLaunches, 0) / 8));
    rank.epoch_words.resize(static_cast<std::size_t>(m3::protocol::epoch_words(kGrid)));
    addresses.push_back(reinterpret_cast<long long>(rank.buffer.data()));
  }
  const std::vector<long long> slots{5, -1, 7};
  const std::vector<int> injection(4);
  std::vector<std::thread> threads;
  for (int r = 0; r < kSizes.world; ++r) {
    threads.emplace_back([&, r] {
      Rank& rank = ranks[static_cast<std::size_t>(r)];
      Layer& layer = rank.layer;
      rank.peers = addresses;
      void* residents = m3_residents_create(kGrid, 64, m3_shared_bytes());
      m3::ffn::Arguments arguments{};
      arguments.part = layer.part.data();
      arguments.residual = layer.residual.data();
      arguments.slots = slots.data();
      arguments.post_norm = layer.post_norm.data();
      arguments.router = layer.router.data();
      arguments.router_bias = layer.bias.data();
      arguments.w13 = reinterpret_cast<const unsigned char*>(layer.w13.data());
      arguments.s13 = reinterpret_cast<const unsigned char*>(layer.s13.data());
      arguments.w2 = reinterpret_cast<const unsigned char*>(layer.w2.data());
      arguments.s2 = reinterpret_cast<const unsigned char*>(layer.s2.data());
      arguments.scratch = reinterpret_cast<unsigned char*>(rank.scratch.data());
      arguments.epoch_words = rank.epoch_words.data();
      for (int peer = 0; peer < kSizes.world; ++peer) arguments.peers[peer] = rank.peers[static_cast<std::size_t>(peer)];
      arguments.injection = injection.data();
      arguments.out = layer.out.data();
      arguments.residual_out = layer.residual_out.data();
      arguments.wait_ticks = 60 * m3::platform::kTicksPerSecond;
      arguments.sizes = kSizes;
      arguments.regions = regions();
      arguments.constants = {1e-6f, 1.702f, 1.0f, 7.0f, 2.0f};
      arguments.rank = r;
      arguments.layer = 3;
      arguments.flight = reinterpret_cast<unsigned char*>(rank.flight.data());
      arguments.flight_launches = kFlightLaunches;
      arguments.mode = static_cast<int>(m3::ffn::Mode::run);
      for (int launch = 0; launch < kLaunches; ++launch) {
        arguments.handshake = launch % 2;
        (packed ? m3_ffn_mxfp4 : m3_ffn_bf16)(residents, &arguments);
      }
      m3_residents_destroy(residents);
    });
  }
  for (std::thread& thread : threads) thread.join();
  int wrong = 0;
  for (const Rank& rank : ranks) {
    wrong += rank.epoch_words[0] != kLaunches || rank.buffer[0] != 0;
    wrong += rank.layer.out != ranks[0].layer.out;
  }
  return wrong;
}

}  // namespace

int main() {
  const int wrong = run(false) + run(true);
  std::printf("%d launches on %d ranks, BF16 and MXFP4: %d wrong\n", kLaunches, kSizes.world, wrong);
  return wrong != 0;
}
