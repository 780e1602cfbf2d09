// Waiting for tagged words. A word whose tag is the launch's carries its value: there is no flag beside it.
//
// Every wait ends: by the words, by the rank's fault word, or by the bound, upon which the waiting rank reports a fault everywhere. A wait
// that did not get its words returns false and the caller goes on: what it computes then is garbage that it must not announce.
#pragma once
#include "m3/fault.h"

namespace m3 {

// device_data: device scope, and the waiting thread will read what was announced with the words.
enum class Scope { device, device_data, system };

// Whether a word belongs to this launch: value pairs carry 32 bits of tag, triple pairs 16.
struct PairTag {
  Bits32 tag;
  M3_DEVICE_METHOD bool matches(Bits64 word) const { return protocol::pair_word_tag(word) == tag; }
};
struct TripleTag {
  Bits32 tag;
  M3_DEVICE_METHOD bool matches(Bits64 word) const { return protocol::triple_word_tag(word) == tag; }
};

// Who is missing when a wait gives up: word i of the wait comes from rank i, or from this rank's own blocks.
enum class Source { rank_of_word, own_blocks };

// What a wait that lasts remembers between its looks.
struct Waiting {
  long long began = 0;
  int recorded = -1;  // the last index that the flight recorder knows of
};

// A look of a wait that lasts, for which word `absent` has not come: whether it goes on. Far from the polls, which are everywhere and short.
//
// A rank whose peer does not come waits in many places: those that wait for the peer itself give up first and name it.
M3_DEVICE_OUTLINE bool waits_on(const FaultLine& line, protocol::Site site, Source source, int absent, Waiting& waiting) {
  if (fault_is_set(line)) return false;
  const long long bound = line.wait_ticks + (source == Source::own_blocks ? line.wait_ticks / 8 : 0);
  const long long now = platform::clock_ticks();
  const int peer = source == Source::rank_of_word ? absent : -1;
  if (waiting.began == 0) {
    waiting.began = now;
  } else if (now - waiting.began >= bound) {
    report_fault(line, site, peer);
    return false;
  }
  if (absent != waiting.recorded && writes_flight(line.flight)) {
    waiting.recorded = absent;
    write_flight(line.flight, waiting.began, protocol::FLIGHT_WAIT, {line.epoch, line.layer, site, peer}, 0);
  }
  platform::pause();
  return true;
}

// Ends the flight record of a wait that lasted.
M3_DEVICE_OUTLINE void record_end_of_wait(const FaultLine& line, protocol::Site site, bool came) {
  write_flight(line.flight, platform::clock_ticks(), protocol::FLIGHT_DONE, {line.epoch, line.layer, site, -1}, came ? 0 : protocol::FLIGHT_LEFT);
}

// Polls until `missing()` returns a negative number; it returns the index of something that has not come otherwise.
template <class Missing>
M3_DEVICE_INLINE bool wait_until(const FaultLine& line, protocol::Site site, Source source, Missing missing) {
  Waiting waiting;
  int absent;
  M3_ROLLED for (int poll = 1; (absent = missing()) >= 0; ++poll) {
    if (poll % platform::kPollsALook == 0 && !waits_on(line, site, source, absent, waiting)) break;
  }
  if (waiting.recorded >= 0) record_end_of_wait(line, site, absent < 0);
  return absent < 0;
}

template <Scope kScope>
M3_DEVICE_INLINE Bits64 load_word(const Bits64* address) {
  if (kScope == Scope::system) return platform::load_system(address);
  return kScope == Scope::device_data ? platform::load_device_data(address) : platform::load_device(address);
}

// Waits for the first `count` of at most kMost words together: all are loaded before any is looked at. `address(i)` names word i.
template <Scope kScope, int kMost, class Tag, class Address>
M3_DEVICE_INLINE bool wait_for_words(const FaultLine& line, protocol::Site site, Source source, Tag tag, int count, Address address,
                                     Bits64 (&word)[kMost]) {
  return wait_until(line, site, source, [&] {
    M3_UNROLL for (int i = 0; i < kMost; ++i) {
      if (i < count) word[i] = load_word<kScope>(address(i));
    }
    int absent = -1;
    M3_UNROLL for (int i = kMost - 1; i >= 0; --i) {
      if (i < count && !tag.matches(word[i])) absent = i;
    }
    return absent;
  });
}

}  // namespace m3
