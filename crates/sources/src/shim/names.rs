//! What one region was asked, and what it answered: each address is asked once, one answer serves a
//! whole method, and an unload makes its code unknown again. Pure, and bounded whatever is asked or
//! answered.

use super::names_memory::NamesMemory;
use profiler_protocol::record::NOT_NOW;
use profiler_protocol::request::NEVER_SEEN;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::time::{Duration, Instant};

/// Questions that may wait or be on their way.
const OPEN: usize = 65_536;
/// Method bodies, and addresses without one, that are remembered.
const REMEMBERED: usize = 262_144;
/// What one of them takes of the room for all regions, about.
const EACH: usize = 64;
/// The same of a question, with its place in the queue.
const QUESTION: usize = 96;
/// An answer that found the ring full does not come again by itself.
const ASK_AGAIN_AFTER: Duration = Duration::from_secs(1);
const TRIES: u8 = 4;

#[derive(Clone, Copy)]
enum RequestProgress {
    Waiting { tries: u8 },
    Sent { tries: u8, at: Instant },
}

#[derive(Clone, Copy)]
struct OpenNameRequest {
    /// When its address was last seen, in the process's time, and what was sent of that.
    seen_ns: u64,
    sent_ns: u64,
    progress: RequestProgress,
}

#[derive(Clone, Copy)]
struct AnsweredBody {
    bytes: u64,
    module_id: u64,
}

/// The questions of one region.
#[derive(Default)]
pub(super) struct NameRequests {
    waiting: VecDeque<u64>,
    open: HashMap<u64, OpenNameRequest>,
    bodies: BTreeMap<u64, AnsweredBody>,
    /// Module and first address of each body: an unload costs what it takes away, not what is
    /// remembered.
    by_module: BTreeSet<(u64, u64)>,
    missing: BTreeSet<u64>,
    share: NamesMemory,
}

impl NameRequests {
    /// One that has its room of this.
    pub(super) fn with(share: NamesMemory) -> Self {
        Self { share, ..Self::default() }
    }

    /// Queues a question about an address seen at `seen_ns`, unless it has been asked or answered.
    /// False when the queue is full.
    pub(super) fn ask(&mut self, address: u64, seen_ns: u64) -> bool {
        if let Some(open) = self.open.get_mut(&address) {
            open.seen_ns = open.seen_ns.max(seen_ns);
            return true;
        }
        if self.missing.contains(&address) || self.covers(address) {
            return true;
        }
        // An answer to what was not sent yet, or is to be sent again, leaves its address in the
        // queue.
        if self.open.len().max(self.waiting.len()) >= OPEN || !self.share.take(QUESTION) {
            return false;
        }
        self.open.insert(
            address,
            OpenNameRequest {
                seen_ns,
                sent_ns: 0,
                progress: RequestProgress::Waiting { tries: 0 },
            },
        );
        self.waiting.push_back(address);
        true
    }

    fn covers(&self, address: u64) -> bool {
        let before = self.bodies.range(..=address).next_back();
        before.is_some_and(|(start, body)| address - start < body.bytes)
    }

    /// Up to `most` questions to send next: the address, and when it was seen.
    pub(super) fn next(&self, most: usize) -> Vec<(u64, u64)> {
        let seen_ns =
            |address| self.open.get(address).map_or(NEVER_SEEN, |question| question.seen_ns);
        self.waiting.iter().take(most).map(|address| (*address, seen_ns(address))).collect()
    }

    /// The first `count` of [`NameRequests::next`] were sent.
    pub(super) fn sent(&mut self, count: usize, now: Instant) {
        for address in self.waiting.drain(..count.min(self.waiting.len())) {
            if let Some(question) = self.open.get_mut(&address)
                && let RequestProgress::Waiting { tries } = question.progress
            {
                question.progress = RequestProgress::Sent { tries: tries + 1, at: now };
                question.sent_ns = question.seen_ns;
            }
        }
    }

    /// Queues questions again whose answer is overdue. Answers how many are given up.
    pub(super) fn repeat(&mut self, now: Instant) -> u64 {
        let mut given_up = 0;
        let (waiting, share) = (&mut self.waiting, &mut self.share);
        self.open.retain(|&address, question| match question.progress {
            RequestProgress::Sent { tries, at }
                if now.saturating_duration_since(at) >= ASK_AGAIN_AFTER =>
            {
                if tries >= TRIES {
                    given_up += 1;
                    share.give(QUESTION);
                    return false;
                }
                question.progress = RequestProgress::Waiting { tries };
                waiting.push_back(address);
                true
            }
            _ => true,
        });
        given_up
    }

    fn close(&mut self, asked: u64) -> Option<OpenNameRequest> {
        let question = self.open.remove(&asked)?;
        self.share.give(QUESTION);
        Some(question)
    }

    /// A method was named. False when nobody asked.
    pub(super) fn found(&mut self, asked: u64, module_id: u64, ranges: &[(u64, u32)]) -> bool {
        if self.close(asked).is_none() {
            return false;
        }
        for &(start, bytes) in ranges {
            if self.bodies.len() < REMEMBERED && self.share.take(EACH) {
                self.remove_body(start);
                self.bodies.insert(start, AnsweredBody { bytes: u64::from(bytes), module_id });
                self.by_module.insert((module_id, start));
            }
        }
        true
    }

    fn remove_body(&mut self, start: u64) {
        if let Some(body) = self.bodies.remove(&start) {
            self.by_module.remove(&(body.module_id, start));
            self.share.give(EACH);
        }
    }

    /// The runtime knows no method there, or cannot be asked now (then the address may be asked
    /// about again). Answers the time that was sent with the question; `None` when nobody asked.
    pub(super) fn not_found(&mut self, asked: u64, hresult: i32) -> Option<u64> {
        let question = self.close(asked)?;
        if hresult != NOT_NOW && self.missing.len() < REMEMBERED && self.share.take(EACH) {
            self.missing.insert(asked);
        }
        Some(question.sent_ns)
    }

    /// Code is gone: `ranges`, and all bodies of `module_id` unless it is 0. Answers all ranges
    /// that are gone.
    pub(super) fn unloaded(
        &mut self,
        module_id: u64,
        ranges: impl Iterator<Item = (u64, u64)>,
    ) -> Vec<(u64, u64)> {
        let mut gone: Vec<(u64, u64)> = ranges.filter(|(_, bytes)| *bytes > 0).collect();
        if module_id != 0 {
            let of_module = self.by_module.range((module_id, 0)..=(module_id, u64::MAX));
            let sized =
                of_module.filter_map(|&(_, start)| Some((start, self.bodies.get(&start)?.bytes)));
            gone.extend(sized);
        }
        for &(start, bytes) in &gone {
            let inside = start..=start.saturating_add(bytes.saturating_sub(1));
            let bodies: Vec<u64> =
                self.bodies.range(inside.clone()).map(|(&start, _)| start).collect();
            bodies.into_iter().for_each(|start| self.remove_body(start));
            while let Some(&address) = self.missing.range(inside.clone()).next() {
                self.missing.remove(&address);
                self.share.give(EACH);
            }
        }
        gone
    }
}

#[cfg(test)]
mod tests {
    use super::{ASK_AGAIN_AFTER, NOT_NOW, NameRequests, OPEN, REMEMBERED, TRIES};
    use std::time::Instant;

    fn send_all(book: &mut NameRequests, now: Instant) -> Vec<u64> {
        let next = book.next(usize::MAX);
        book.sent(next.len(), now);
        next.into_iter().map(|(address, _)| address).collect()
    }

    #[test]
    fn one_answer_serves_the_whole_method() {
        let now = Instant::now();
        let mut book = NameRequests::default();
        assert!(book.ask(0x1010, 1) && book.ask(0x1010, 1) && book.ask(0x1020, 1));
        assert_eq!(send_all(&mut book, now), [0x1010, 0x1020]);
        assert!(book.found(0x1010, 7, &[(0x1000, 0x100), (0x9000, 8)]));
        // The other question was on its way already and has its own answer.
        assert!(book.found(0x1020, 7, &[(0x1000, 0x100), (0x9000, 8)]));
        assert_eq!(book.open.len(), 0);
        assert!(book.ask(0x10ff, 1) && book.ask(0x9007, 1));
        assert!(book.next(10).is_empty());
        assert!(book.ask(0x1100, 1));
        assert_eq!(book.next(10), [(0x1100, 1)]);
    }

    #[test]
    fn an_answer_nobody_asked_for_is_refused() {
        let mut book = NameRequests::default();
        assert!(!book.found(1, 1, &[(0, 100)]) && book.not_found(2, -1).is_none());
        assert!(book.ask(1, 1));
        assert_eq!(book.open.len(), 1);
    }

    #[test]
    fn what_cannot_be_asked_now_may_be_asked_later() {
        let mut book = NameRequests::default();
        for hresult in [NOT_NOW, -1] {
            assert!(book.ask(0x1000, 1));
            assert_eq!(book.next(10), [(0x1000, 1)]);
            send_all(&mut book, Instant::now());
            assert_eq!(book.not_found(0x1000, hresult), Some(1));
        }
        assert!(book.ask(0x1000, 1));
        assert!(book.next(10).is_empty(), "the runtime has said no");
    }

    #[test]
    fn a_question_that_waits_or_is_repeated_tells_the_newest_time() {
        let now = Instant::now();
        let mut book = NameRequests::default();
        for seen in [5, 9, 7] {
            assert!(book.ask(0x1000, seen));
        }
        assert_eq!(book.next(10), [(0x1000, 9)]);
        book.sent(1, now);
        assert!(book.ask(0x1000, 11) && book.next(10).is_empty());
        book.repeat(now + ASK_AGAIN_AFTER);
        assert_eq!(book.next(10), [(0x1000, 11)]);
        book.sent(1, now);
        assert!(book.ask(0x1000, 13));
        assert_eq!(book.not_found(0x1000, NOT_NOW), Some(11), "that is what the answer is about");
        assert!(book.open.is_empty() && book.waiting.is_empty());
    }

    #[test]
    fn unloaded_code_is_asked_about_again() {
        let now = Instant::now();
        let mut book = NameRequests::default();
        for address in [0x1000, 0x2000, 0x3000] {
            assert!(book.ask(address, 1));
        }
        send_all(&mut book, now);
        book.found(0x1000, 7, &[(0x1000, 16)]);
        book.found(0x2000, 8, &[(0x2000, 16)]);
        book.not_found(0x3000, -1);
        assert_eq!(
            book.unloaded(7, [(0x3000, 16), (0x5000, 0)].into_iter()),
            [(0x3000, 16), (0x1000, 16)]
        );
        for address in [0x1000, 0x2000, 0x3000] {
            assert!(book.ask(address, 1));
        }
        assert_eq!(book.next(10), [(0x1000, 1), (0x3000, 1)]);
    }

    /// Ends soon only when an unload costs what it takes away: a hostile shim sends hundreds in one
    /// round.
    #[test]
    fn many_unloads_from_a_full_book_cost_little() {
        let mut book = NameRequests::default();
        let many = REMEMBERED as u64 / 4;
        let ranges: Vec<(u64, u32)> = (0..many).map(|body| (body << 4, 16)).collect();
        assert!(book.ask(0, 1));
        for (module, ranges) in (1..).zip(ranges.chunks(2)) {
            assert!(book.ask(u64::MAX, 1));
            assert!(book.found(u64::MAX, module, ranges));
        }
        book.missing.extend((0..many).map(|missing| (missing << 4) + 8));
        for (module, ranges) in (1..).zip(ranges.chunks(2)) {
            let told = ranges.iter().take(1).map(|&(start, bytes)| (start, u64::from(bytes)));
            let gone = book.unloaded(module, told);
            assert_eq!(gone.len(), 3, "one as told, two of the module");
        }
        assert!(book.bodies.is_empty() && book.by_module.is_empty() && book.missing.is_empty());
    }

    #[test]
    fn a_body_that_another_modules_replaced_goes_with_that_one() {
        let mut book = NameRequests::default();
        for module in [7, 8] {
            assert!(book.ask(0x2000 + module, 1));
            assert!(book.found(0x2000 + module, module, &[(0x1000, 16)]));
        }
        assert!(book.ask(0x3000, 1) && book.found(0x3000, 0, &[(0x3000, 16)]));
        assert_eq!(book.unloaded(7, [].into_iter()), []);
        assert_eq!(book.unloaded(0, [(0x5000, 1)].into_iter()), [(0x5000, 1)]);
        assert!(book.covers(0x1000) && book.covers(0x3000), "an unload of no module takes none");
        assert_eq!(
            book.unloaded(8, [(u64::MAX, u64::MAX)].into_iter()),
            [(u64::MAX, u64::MAX), (0x1000, 16)]
        );
        assert!(!book.covers(0x1000) && book.covers(0x3000));
    }

    #[test]
    fn a_lost_answer_is_asked_for_again_and_given_up_in_the_end() {
        let mut now = Instant::now();
        let mut book = NameRequests::default();
        book.ask(5, 1);
        for _ in 0..TRIES {
            assert_eq!(send_all(&mut book, now), [5]);
            assert_eq!(book.repeat(now), 0);
            assert!(book.next(1).is_empty());
            now += ASK_AGAIN_AFTER;
            let given_up = book.repeat(now);
            assert_eq!(given_up, u64::from(book.open.is_empty()));
        }
        assert_eq!(book.open.len(), 0);
    }

    #[test]
    fn the_queue_has_an_end() {
        let mut book = NameRequests::default();
        assert_eq!((0..=OPEN as u64).filter(|&address| !book.ask(address, 1)).count(), 1);
        // Also for a process that takes no question and answers all.
        let mut book = NameRequests::default();
        let refused =
            (0..=OPEN).filter(|_| !book.ask(1, 1) || book.not_found(1, NOT_NOW).is_none()).count();
        assert_eq!((refused, book.waiting.len()), (1, OPEN));
    }
}
