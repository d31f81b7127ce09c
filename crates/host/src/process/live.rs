//! One live process and the view a walk has of it: which code an address is in, what frame that is
//! and by which rule it is left. JIT memory is looked at again once a second per method in use: a
//! body that was replaced gets a new generation.

use super::budget::{CommonBudget, ProcessBudget, cpu_time};
use super::counters::ProcessTableCounters;
use super::guarded_io::{IoPeer, wait_for};
use super::images::{ImageCache, ParentFallback};
use super::mapping::{FileKey, Mapping, MappingKind, Mappings, Replaced, parse_maps_line};
use super::memory::{MAX_MAPS_BYTES, ProcessMemory};
use super::rule_update::{self, RuleUpdate, RuleUpdates};
use super::{ImageError, ProcessError};
use crate::process::seed::still_sleeps;
use foldhash::{HashMap, HashMapExt as _};
use perfusion_model::backoff::Backoff;
use perfusion_model::event::{BlockedThread, MonotonicNs, ProbeWalk, UserContext, UserRegs};
use perfusion_model::frame::{FrameKey, ImageId, ProcessId};
use perfusion_unwind::TargetMemory;
use perfusion_unwind::encode::encode;
use perfusion_unwind::managed::{CODE_BYTES, JitBody, SearchBudget};
use perfusion_unwind::native::NATIVE;
use perfusion_unwind::rule::{FrameKind, Rule, RuleRefusal};
use perfusion_unwind::unwinder::{CodeLookup, FrameRule, UnwindTrace};
use std::collections::{BTreeMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{ErrorKind, Read};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Most PCs whose step is remembered per process, and most JIT bodies.
const MAX_STEPS: usize = 16_384;
const MAX_BODIES: usize = 16_384;
/// What of either is dropped at once where there is no room, one part of all.
const DROPPED_PART: usize = 4;
/// Files known beside those that are mapped now.
const FEW_IMAGES: usize = 64;
/// How long it may take until the probes know no more what was taken back.
const TAKEN_BACK: Duration = Duration::from_secs(2);
/// Most start addresses of former bodies whose generation is remembered per process.
const MAX_FORMER: usize = 16_384;
/// Most frames of remembered stacks per process, and of what is remembered besides as many words.
const MAX_WALKED_FRAMES: usize = 16_384;
/// Most stacks remembered that were copied at the same instruction with the same stack pointer:
/// callers differ.
const MAX_LIKE_COPIES: usize = 4;
/// Most distinct rules shared between processes.
const MAX_RULES: usize = 32_768;
/// Bytes of a stack read at once where its copy has ended.
const STACK_PIECE_BYTES: usize = 64 << 10;
/// Most bytes of a vDSO.
const MAX_VDSO_BYTES: u64 = 64 << 10;
/// Bytes of JIT memory one process may have searched in the period of its [`Share`].
const BUDGET_BYTES: u64 = 64 << 20;
/// How long a look at JIT memory holds.
const RECHECK: Duration = Duration::from_secs(1);
/// Bodies looked at again at once, each some reads of the process's memory: those that were met
/// since the last look and will soon be due.
const BODIES_AT_ONCE: usize = 128;
/// And no more than there is time for: a batch that takes too long is given up, and its process
/// left alone for a minute, by whom a busy machine did that.
const TIME_AT_ONCE: Duration = Duration::from_millis(20);
/// How long it holds when the next one is not to be had although the process lives: a busy machine
/// holds a reading up for a moment; who holds it up for longer, or has others' held up, is not to
/// have a name that may be another method's by now.
const UNSEEN: Duration = Duration::from_secs(5);
/// Shortest time between two readings of a process's maps because of an address no mapping covers;
/// it doubles up to the longest while they find nothing.
const REFRESH: Duration = Duration::from_millis(100);
const LONGEST_REFRESH: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(super) struct CachedStep {
    step: FrameRule,
    /// For JIT memory: when it was last looked at.
    checked: Option<Instant>,
    /// Since when the probes know the rule, or [`ON_ITS_WAY`].
    taught: Option<MonotonicNs>,
}

impl CachedStep {
    fn holds(&self, now: Instant) -> bool {
        self.checked.is_none_or(|at| now.duration_since(at) < RECHECK)
    }
}

/// Of a rule that the probes do not know yet: later than any sample.
const ON_ITS_WAY: MonotonicNs = MonotonicNs(u64::MAX);

#[derive(Debug)]
pub(super) struct CachedBody {
    pub(super) body: JitBody,
    pub(super) generation: u32,
    /// When it was last looked at.
    pub(super) checked: Instant,
    /// It was met since then.
    pub(super) is_used: bool,
}

impl CachedBody {
    fn holds(&self, now: Instant) -> bool {
        now.duration_since(self.checked) < RECHECK
    }
}

/// What is left of a body that is not known any more.
#[derive(Clone, Copy, Debug)]
pub(super) struct RetiredBody {
    /// Its generation when it may still be there, else the next one.
    generation: u32,
    /// By what to tell it, when it may still be there: it was dropped to save room.
    print: Option<u64>,
}

impl RetiredBody {
    /// The generation of other code in its place.
    fn next(self) -> u32 {
        self.generation.saturating_add(u32::from(self.print.is_some()))
    }
}

/// The same for the same body.
fn print(body: &JitBody) -> u64 {
    let mut hasher = DefaultHasher::new();
    body.hash(&mut hasher);
    hasher.finish()
}

/// Where a program's code and stack begin: others after each exec, for the kernel takes them at
/// random.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ProgramLayout {
    code: u64,
    stack: u64,
}

impl ProgramLayout {
    pub(super) fn of(stat: &procfs::process::Stat) -> Self {
        Self { code: stat.startcode, stack: stat.startstack }
    }

    /// False when the kernel did not say, which it tells only those who may trace the process.
    pub(super) fn is_told(self) -> bool {
        self.stack != 0
    }
}

/// A live process.
#[derive(Debug)]
pub(super) struct LiveProcess {
    pub(super) id: ProcessId,
    pub(super) pid: u32,
    pub(super) start_ticks: Option<u64>,
    pub(super) is_clr: bool,
    pub(super) mappings: Arc<Mappings>,
    /// What it was when its start was read.
    pub(super) program: Option<ProgramLayout>,
    /// An exec or a mapping of it may be unknown: it is to be read anew before its next stack is
    /// walked.
    pub(super) in_doubt: bool,
    /// Files of its mappings, once resolved; `None` for those that cannot be.
    pub(super) images: HashMap<FileKey, Option<ImageId>>,
    pub(super) vdso: Option<ImageId>,
    pub(super) memory: Option<ProcessMemory>,
    /// By address and whether it is exact (lowest bit).
    pub(super) steps: BTreeMap<u64, CachedStep>,
    pub(super) bodies: BTreeMap<u64, CachedBody>,
    /// By start address; none is in `bodies`.
    pub(super) former: BTreeMap<u64, RetiredBody>,
    /// Generation of starts that are in neither: newer than any that `former` has forgotten.
    pub(super) oldest_generation: u32,
    pub(super) budget: SearchBudget,
    /// Of the work for all processes.
    pub(super) share: ProcessBudget,
    /// Where its files may be found when it is gone: with the process it was made by, unchanged
    /// since it was made or first looked at.
    pub(super) elsewhere: Option<ParentFallback>,
    /// The address space of the rules the probes know.
    pub(super) space: Option<u32>,
    /// The one before, when that was given up for want of room and not because code was replaced.
    former_space: Option<u32>,
    /// When code was replaced last.
    replaced_at: Option<MonotonicNs>,
    /// Places whose rules they are to forget.
    unlearned: Vec<u64>,
    /// Places whose rules are on their way to them.
    on_their_way: Vec<u64>,
    /// Whether code was replaced whose rules are not taken back yet, and whether that is on its way
    /// to them.
    is_replaced: bool,
    is_taken_back: bool,
    /// Stacks the probes walked, by their places.
    walked: WalkedStacks,
    pub(super) refreshed: Option<Instant>,
    pub(super) refresh_after: Backoff,
    /// When its last stack was walked.
    pub(super) used: Instant,
    /// Stacks walked, and those of them that did not reach the thread's start.
    pub(super) stacks: u64,
    pub(super) stacks_broken: u64,
}

impl LiveProcess {
    pub(super) fn new(
        id: ProcessId,
        pid: u32,
        start_ticks: Option<u64>,
        mappings: Arc<Mappings>,
    ) -> Self {
        let mut process = Self {
            id,
            pid,
            start_ticks,
            is_clr: false,
            mappings,
            program: None,
            in_doubt: false,
            images: HashMap::new(),
            vdso: None,
            memory: None,
            steps: BTreeMap::new(),
            bodies: BTreeMap::new(),
            former: BTreeMap::new(),
            oldest_generation: 0,
            budget: SearchBudget { bytes: BUDGET_BYTES },
            share: ProcessBudget::new(Instant::now()),
            elsewhere: None,
            space: None,
            former_space: None,
            replaced_at: None,
            unlearned: Vec::new(),
            on_their_way: Vec::new(),
            is_replaced: false,
            is_taken_back: false,
            walked: WalkedStacks::default(),
            refreshed: None,
            refresh_after: Backoff::new(REFRESH, LONGEST_REFRESH),
            used: Instant::now(),
            stacks: 0,
            stacks_broken: 0,
        };
        process.is_clr = process.mappings.iter().any(belongs_to_clr);
        process
    }

    pub(super) fn map(&mut self, mapping: Mapping, counters: &mut ProcessTableCounters) {
        self.is_clr |= belongs_to_clr(&mapping);
        let range = mapping.range.clone();
        let met = self.mappings.met(&range);
        let key = mapping.file();
        match Arc::make_mut(&mut self.mappings).insert(mapping) {
            Replaced::Nothing => {}
            Replaced::Perhaps => self.recheck(&range),
            Replaced::Certainly => self.forget(&range),
            Replaced::Refused => {
                counters.mappings_refused += 1;
                self.forget(&met);
            }
        }
        // A file that could not be opened may be another by now.
        if self.images.get(&key) == Some(&None) {
            self.images.remove(&key);
        }
        // A file it has mapped once and does no more takes no room for ever.
        if self.images.len() > 2 * self.mappings.len() + FEW_IMAGES {
            let mapped: HashSet<FileKey> = self.mappings.iter().map(Mapping::file).collect();
            self.images.retain(|key, _| mapped.contains(key));
        }
    }

    /// The file behind mappings was looked for: whatever was known by another one that had its
    /// place, as when it is rewritten and mapped again, goes.
    pub(super) fn set_image(&mut self, key: FileKey, image: Option<ImageId>) {
        let known = self.images.insert(key, image).flatten();
        if known.is_some() && known != image {
            self.forget_file(key);
        }
    }

    /// What is known by a file may be another file's.
    pub(super) fn forget_file(&mut self, key: FileKey) {
        let of_file =
            self.mappings.iter().filter(|m| m.region == MappingKind::File && m.file() == key);
        let ranges: Vec<Range<u64>> = of_file.map(|mapping| mapping.range.clone()).collect();
        for range in ranges {
            self.forget(&range);
        }
    }

    /// Takes up all its mappings as they are; what was known of code that is still there stays.
    pub(super) fn remap(&mut self, seen: Vec<Mapping>, counters: &mut ProcessTableCounters) {
        let mut now = Mappings::default();
        for mapping in seen {
            if now.insert(mapping.clone()) == Replaced::Refused {
                counters.mappings_refused += 1;
            } else if !self.mappings.has(&mapping) {
                self.map(mapping, counters);
            }
        }
        let gone: Vec<Range<u64>> =
            self.mappings.iter().flat_map(|old| now.uncovered(&old.range)).collect();
        for range in gone {
            self.forget(&range);
        }
        self.mappings = Arc::new(now);
    }

    /// Forgets where its code is, until it is read anew.
    pub(super) fn drop_mappings(&mut self, lessons: &mut RuleUpdates) {
        self.clear_caches(lessons);
        (self.mappings, self.images, self.in_doubt) = (Arc::default(), HashMap::new(), true);
    }

    /// Begins a new period of its share of work when one is over.
    pub(super) fn refill(&mut self, common: &mut CommonBudget, now: Instant) {
        common.refill(now);
        if self.share.refill(now) {
            self.budget = SearchBudget { bytes: BUDGET_BYTES };
        }
    }

    /// Remembered steps and bodies.
    pub(super) fn cached(&self) -> usize {
        self.steps.len() + self.bodies.len()
    }

    /// Drops remembered steps and bodies. The probes' rules go with them: one that is not
    /// remembered could not be taken back. What they have walked by them still holds.
    pub(super) fn clear_caches(&mut self, lessons: &mut RuleUpdates) {
        self.walked.clear();
        self.steps.clear();
        while let Some((start, known)) = self.bodies.pop_first() {
            self.drop_body(start, &known);
        }
        self.unlearned.clear();
        self.former_space = self.space.or(self.former_space);
        self.close_space(lessons);
    }

    /// Drops some of the remembered steps: first of those where threads were interrupted, which are
    /// many and seldom met twice.
    fn evict_steps(&mut self) {
        let most = MAX_STEPS / DROPPED_PART;
        let exact = self.steps.keys().filter(|key| *key & 1 != 0);
        let callers = self.steps.keys().filter(|key| *key & 1 == 0).step_by(DROPPED_PART);
        let dropped: Vec<u64> = exact.chain(callers).copied().take(most).collect();
        for key in dropped {
            self.drop_step(key);
        }
    }

    /// Drops the bodies that were looked at longest ago. Their steps stay.
    fn evict_bodies(&mut self) {
        let mut oldest: Vec<(Instant, u64)> =
            self.bodies.iter().map(|(start, known)| (known.checked, *start)).collect();
        oldest.sort_unstable();
        for (_, start) in oldest.into_iter().take(MAX_BODIES / DROPPED_PART) {
            if let Some(known) = self.bodies.remove(&start) {
                self.drop_body(start, &known);
            }
        }
    }

    /// A body was removed that may still be there. Its name is its generation's, so whatever is
    /// found there next is looked at for whether it is the same.
    fn drop_body(&mut self, start: u64, known: &CachedBody) {
        self.retire(
            start,
            RetiredBody { generation: known.generation, print: Some(print(&known.body)) },
        );
    }

    fn retire(&mut self, start: u64, former: RetiredBody) {
        if self.former.len() >= MAX_FORMER {
            let newest = self.former.values().map(|former| former.next()).max().unwrap_or(0);
            self.oldest_generation = self.oldest_generation.max(newest);
            self.former.clear();
        }
        self.former.insert(start, former);
    }

    /// Bodies in `range` that were dropped are not there any more.
    fn forget_former(&mut self, range: Range<u64>) {
        for (_, former) in self.former.range_mut(range) {
            *former = RetiredBody { generation: former.next(), print: None };
        }
    }

    fn drop_step(&mut self, key: u64) {
        if self.steps.remove(&key).is_some_and(|cached| cached.taught.is_some()) {
            self.unlearned.push(key);
        }
    }

    /// Whether the probes could not have walked at `time` by a rule of code that had been replaced.
    fn is_unreplaced(&self, time: MonotonicNs) -> bool {
        let since = |at: MonotonicNs| time.0.checked_sub(at.0).map(Duration::from_nanos);
        self.replaced_at.is_none_or(|at| since(at).is_some_and(|since| since > TAKEN_BACK))
    }

    /// Whether what the probes walked by the rules of an address space may hold still.
    pub(super) fn knows_space(&self, space: u32) -> bool {
        space == self.space.unwrap_or(0) || Some(space) == self.former_space
    }

    /// The probes are to walk no more of its stacks by the rules they know.
    pub(super) fn close_space(&mut self, lessons: &mut RuleUpdates) {
        if self.space.take().is_some() {
            lessons.push(RuleUpdate::NoSpace { pid: self.pid });
        }
    }

    /// Has the probes forget what was unlearned.
    pub(super) fn take_back(&mut self, lessons: &mut RuleUpdates) {
        if std::mem::take(&mut self.is_replaced) && !self.unlearned.is_empty() {
            self.is_taken_back = true;
            lessons.touches(self.pid);
        }
        for place in self.unlearned.drain(..) {
            if let Some(space) = self.space {
                lessons.push(RuleUpdate::Forget { key: rule_update::key(space, place) });
            }
        }
    }

    /// All lessons have come to the probes: what they walk from `now` on they walk by those.
    pub(super) fn lessons_arrived(&mut self, now: MonotonicNs) {
        for place in self.on_their_way.drain(..) {
            if let Some(cached) = self.steps.get_mut(&place)
                && cached.taught == Some(ON_ITS_WAY)
            {
                cached.taught = Some(now);
            }
        }
        if std::mem::take(&mut self.is_taken_back) {
            self.replaced_at = Some(now);
        }
    }

    fn forget_steps(&mut self, range: &Range<u64>) {
        let gone: Vec<u64> = self.steps.range(step_keys(range)).map(|(key, _)| *key).collect();
        for key in gone {
            self.drop_step(key);
        }
    }

    /// The frames of a stack the probes walked to the thread's start, when it was walked before and
    /// none of it may have changed since.
    pub(super) fn walked_before(&self, walk: &ProbeWalk, now: Instant) -> Option<&[FrameKey]> {
        self.walked.get(walk, now)
    }

    /// Remembers the frames of a stack the probes walked to the thread's start.
    pub(super) fn remember_walk(&mut self, walk: &ProbeWalk, frames: &[FrameKey], now: Instant) {
        self.walked.insert(walk, frames, now);
    }

    /// The frames of a copied stack that was walked before, when nothing the walk went by is
    /// different.
    pub(super) fn copied_before(&self, context: &UserContext, now: Instant) -> Option<&[FrameKey]> {
        self.walked.get_copy(context, now)
    }

    /// Remembers the frames of a copied stack that was walked to the thread's start.
    pub(super) fn remember_copy(
        &mut self,
        context: &UserContext,
        trace: UnwindTrace,
        frames: &[FrameKey],
        now: Instant,
    ) {
        self.walked.insert_copy(context, trace, frames, now);
    }

    /// Some of its code is not what it was.
    fn code_is_replaced(&mut self) {
        self.walked.clear();
        (self.replaced_at, self.is_replaced) = (Some(MonotonicNs::now()), true);
    }

    /// Code in `range` is gone.
    pub(super) fn forget(&mut self, range: &Range<u64>) {
        self.code_is_replaced();
        let starts: Vec<u64> = self.bodies_in(range);
        for start in starts {
            if let Some(known) = self.bodies.remove(&start) {
                self.retire(
                    start,
                    RetiredBody { generation: known.generation.saturating_add(1), print: None },
                );
                let body = known.body.range;
                self.forget_steps(&body);
            }
        }
        self.forget_steps(range);
        self.forget_former(range.clone());
    }

    /// Code in `range` may have changed: the next use looks again.
    fn recheck(&mut self, range: &Range<u64>) {
        self.walked.clear();
        let Some(past) = Instant::now().checked_sub(RECHECK) else { return self.forget(range) };
        for start in self.bodies_in(range) {
            if let Some(known) = self.bodies.get_mut(&start) {
                known.checked = past;
            }
        }
        for (_, cached) in self.steps.range_mut(step_keys(range)) {
            if cached.checked.is_some() {
                cached.checked = Some(past);
            }
        }
    }

    fn bodies_in(&self, range: &Range<u64>) -> Vec<u64> {
        let first = self
            .bodies
            .range(..range.start)
            .next_back()
            .filter(|(_, k)| k.body.range.end > range.start);
        first.into_iter().chain(self.bodies.range(range.clone())).map(|(start, _)| *start).collect()
    }

    /// The known body that covers `pc`, and its start.
    fn body_at(&self, pc: u64) -> Option<(u64, &CachedBody)> {
        let (&start, known) = self.bodies.range(..=pc).next_back()?;
        known.body.range.contains(&pc).then_some((start, known))
    }

    /// Whether the process is still there, if only as one that nobody has waited for.
    fn is_alive(&self) -> bool {
        self.start_ticks.is_some_and(|ticks| super::start_ticks(self.pid) == Some(ticks))
    }

    fn memory(&mut self) -> Option<&ProcessMemory> {
        if self.memory.is_none() {
            self.memory = ProcessMemory::open(self.pid, self.start_ticks?);
        }
        self.memory.as_ref()
    }

    fn read(&mut self, address: u64, into: &mut [u8]) -> usize {
        self.memory().map_or(0, |m| m.read(address, into))
    }
}

/// Stacks that were walked whole and the frames they are, as long as one look at JIT memory holds:
/// those of the probes by their places, copies by what the walk went by.
#[derive(Debug, Default)]
struct WalkedStacks {
    stacks: HashMap<Box<[u64]>, Box<[FrameKey]>>,
    copies: HashMap<CopyKey, Vec<WalkedCopy>>,
    /// Frames of all of them, and words of the traces.
    frames: usize,
    /// When the first was looked at, and when the first of the probes was walked: one that was
    /// walked earlier may have been by other rules.
    since: Option<Instant>,
    first_walk: Option<MonotonicNs>,
}

/// A copy that was walked, and its frames.
type WalkedCopy = (UnwindTrace, Box<[FrameKey]>);

/// What two contexts must have in common for a trace of the one to be of use to the other.
#[derive(Debug, PartialEq, Eq, Hash)]
struct CopyKey {
    ip: u64,
    stack_pointer: u64,
    bytes: usize,
    skipped: u64,
    limited: bool,
    known: u16,
}

impl CopyKey {
    fn of(context: &UserContext) -> Self {
        let &UserContext { regs: UserRegs { gpr, ip, known }, ref stack, skipped, limited, .. } =
            context;
        let stack_pointer = gpr[NATIVE.stack_pointer.index()];
        Self { ip, stack_pointer, bytes: stack.len(), skipped, limited, known }
    }
}

impl WalkedStacks {
    fn holds(&self, now: Instant) -> bool {
        self.since.is_some_and(|looked| now.duration_since(looked) < RECHECK)
    }

    fn get(&self, walk: &ProbeWalk, now: Instant) -> Option<&[FrameKey]> {
        let holds = self.holds(now) && self.first_walk? <= walk.time;
        if holds { self.stacks.get(walk.frames.as_slice()).map(|frames| &**frames) } else { None }
    }

    fn insert(&mut self, walk: &ProbeWalk, frames: &[FrameKey], now: Instant) {
        self.renew(now);
        self.first_walk.get_or_insert(walk.time);
        if self.has_room(walk.frames.len()) {
            self.stacks.insert(walk.frames.as_slice().into(), frames.into());
        }
    }

    fn get_copy(&self, context: &UserContext, now: Instant) -> Option<&[FrameKey]> {
        let like = self.copies.get(&CopyKey::of(context)).filter(|_| self.holds(now))?;
        like.iter().find(|(trace, _)| trace.holds_in(context)).map(|(_, frames)| &**frames)
    }

    fn insert_copy(
        &mut self,
        context: &UserContext,
        trace: UnwindTrace,
        frames: &[FrameKey],
        now: Instant,
    ) {
        self.renew(now);
        let key = CopyKey::of(context);
        let full = self.copies.get(&key).is_some_and(|like| like.len() >= MAX_LIKE_COPIES);
        if !full && self.has_room(frames.len() + trace.words()) {
            self.copies.entry(key).or_default().push((trace, frames.into()));
        }
    }

    fn renew(&mut self, now: Instant) {
        if !self.holds(now) {
            self.clear();
            self.since = Some(now);
        }
    }

    fn has_room(&mut self, frames: usize) -> bool {
        let room = self.frames + frames <= MAX_WALKED_FRAMES;
        self.frames += if room { frames } else { 0 };
        room
    }

    fn clear(&mut self) {
        self.stacks.clear();
        self.copies.clear();
        self.frames = 0;
        (self.since, self.first_walk) = (None, None);
    }
}

/// Keys of `steps` for the addresses in `range`.
fn step_keys(range: &Range<u64>) -> Range<u64> {
    let key = |address: u64| address.min(u64::MAX >> 1) << 1;
    key(range.start)..key(range.end).max(key(range.start))
}

fn belongs_to_clr(mapping: &Mapping) -> bool {
    mapping.region == MappingKind::Jit { doublemapped: true }
        || mapping.path.ends_with("/libcoreclr.so")
}

/// Looks whether bodies are still there: at the first, and at as many others as there is time for.
fn looks(
    bodies: Vec<(u64, JitBody)>,
    memory: &dyn TargetMemory,
    time: Duration,
) -> Vec<(u64, Option<bool>, Range<u64>)> {
    let begin = Instant::now();
    let mut seen = Vec::new();
    for (start, body) in bodies {
        if !seen.is_empty() && begin.elapsed() >= time {
            break;
        }
        seen.push((start, body.is_current(NATIVE, memory), body.range));
    }
    seen
}

/// Memory of a process that is gone.
struct NoMemory;

impl TargetMemory for NoMemory {
    fn read(&self, _address: u64, _into: &mut [u8]) -> usize {
        0
    }
}

/// Everything a walk needs of one process.
pub(super) struct CodeView<'a> {
    pub(super) process: &'a mut LiveProcess,
    pub(super) images: &'a mut ImageCache,
    pub(super) rules: &'a mut HashSet<Arc<Rule>>,
    pub(super) counters: &'a mut ProcessTableCounters,
    pub(super) lessons: &'a mut RuleUpdates,
    pub(super) common: &'a mut CommonBudget,
    pub(super) now: Instant,
    /// Whether the probes ask: they are taught the rules of the frames they handed over.
    pub(super) teaching: RulePush,
    /// The thread, when it was blocked.
    pub(super) asleep: Option<BlockedThread>,
}

/// What the probes are taught on the way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RulePush {
    /// Nothing: the context is not from them.
    Off,
    /// The next frame's rule, even if they were taught it before: they seem to have lost it.
    Again,
    /// Rules they were not taught.
    New,
}

impl CodeView<'_> {
    fn find(&mut self, pc: u64) -> Option<Mapping> {
        if let Some(mapping) = self.process.mappings.find(pc) {
            return Some(mapping.clone());
        }
        let after = self.process.refresh_after.delay();
        let recent = self.process.refreshed.is_some_and(|at| self.now.duration_since(at) < after);
        if recent {
            return None;
        }
        self.process.refreshed = Some(self.now);
        self.counters.refreshes += 1;
        let ticks = self.process.start_ticks?;
        if super::start_ticks(self.process.pid) != Some(ticks) {
            return None;
        }
        for mapping in read_maps(self.process.pid).ok()? {
            if !self.process.mappings.has(&mapping) {
                self.process.map(mapping, self.counters);
            }
        }
        let found = self.process.mappings.find(pc).cloned();
        if found.is_some() {
            self.process.refresh_after.reset();
        } else {
            self.process.refresh_after.failed();
        }
        found
    }

    fn intern(&mut self, rule: Rule) -> Arc<Rule> {
        if let Some(known) = self.rules.get(&rule) {
            return Arc::clone(known);
        }
        if self.rules.len() >= MAX_RULES {
            self.rules.clear();
        }
        let rule = Arc::new(rule);
        self.rules.insert(Arc::clone(&rule));
        rule
    }

    fn unknown(&self, address: u64) -> FrameKey {
        FrameKey::Unknown { process: self.process.id, address }
    }

    pub(super) fn resolve(
        &mut self,
        pc: u64,
        exact: bool,
    ) -> (FrameKey, Result<Rule, RuleRefusal>) {
        let Some(mapping) = self.find(pc) else {
            return (self.unknown(pc), Err(RuleRefusal::NoEntry));
        };
        match mapping.region {
            MappingKind::File => self.in_file(&mapping, pc, exact),
            MappingKind::Vdso => self.in_vdso(&mapping, pc, exact),
            MappingKind::Jit { .. } if self.process.is_clr => self.in_jit(&mapping, pc, exact),
            MappingKind::Jit { .. } | MappingKind::Other => {
                (self.unknown(pc), Err(RuleRefusal::NoEntry))
            }
        }
    }

    fn image(&mut self, mapping: &Mapping) -> Option<ImageId> {
        let key = mapping.file();
        match self.process.images.get(&key) {
            Some(None) => return None,
            Some(Some(id)) if self.images.get(*id).is_some_and(|i| !i.is_closed()) => {
                return Some(*id);
            }
            _ => {}
        }
        let closed = self.process.images.get(&key).copied().flatten();
        let resolved = self.images.resolve(self.process.pid, mapping, self.process.elsewhere);
        if let Err(error) = &resolved {
            self.counters.images_failed += 1;
            tracing::debug!(%error, "mapped file not usable");
        }
        // One that was closed for want of room and cannot be opened again is still the same file.
        // A file system that did not answer in time may do so later.
        let slow = matches!(&resolved, Err(ImageError::Open { source, .. }) if source.kind() == ErrorKind::TimedOut);
        let id = resolved.ok().or(closed);
        if !slow {
            self.process.set_image(key, id);
        }
        id
    }

    fn in_file(
        &mut self,
        mapping: &Mapping,
        pc: u64,
        exact: bool,
    ) -> (FrameKey, Result<Rule, RuleRefusal>) {
        let Some(id) = self.image(mapping) else {
            return (self.unknown(pc), Err(RuleRefusal::Unreadable));
        };
        let Some(image) = self.images.get(id) else {
            return (self.unknown(pc), Err(RuleRefusal::Unreadable));
        };
        let offset = mapping.file_offset_of(pc);
        if let Some(address) = image.elf_address(offset) {
            return self.in_elf(id, address, offset, exact);
        }
        // An assembly, by itself or inside a single-file program.
        let directory = self.images.exceptions(id, offset);
        let Some((rva, pe)) = self.images.get(id).and_then(|image| image.pe_at(offset)) else {
            return (self.unknown(pc), Err(RuleRefusal::NoEntry));
        };
        let Some(directory) = directory else {
            return (self.unknown(pc), Err(RuleRefusal::Unreadable));
        };
        let Some(function) = directory.function(NATIVE, &pe, rva) else {
            return self.stub(pc, &self.code(id, offset));
        };
        let start = pc.wrapping_sub(u64::from(rva - function.begin));
        let frame = FrameKey::Managed { process: self.process.id, start, generation: 0 };
        (frame, directory.rule(NATIVE, &pe, function, rva, exact))
    }

    /// The frame and rule at `address` of an ELF image, which is at `offset` in the file.
    fn in_elf(
        &mut self,
        id: ImageId,
        address: u64,
        offset: u64,
        exact: bool,
    ) -> (FrameKey, Result<Rule, RuleRefusal>) {
        let frame = FrameKey::Native { image: id, address };
        // A return address is looked up one byte before, but the code to look at is behind it.
        if let Some(signal_return) = NATIVE.signal_return
            && let Some(rule) =
                signal_return(&self.code(id, offset.wrapping_add(u64::from(!exact))))
        {
            return (frame, Ok(rule));
        }
        // The return address of a context's first function is the beginning of another one, behind
        // whose last byte nothing is called.
        if !exact && (NATIVE.is_context_start)(&self.code(id, offset.wrapping_add(1))) {
            let frame = FrameKey::Native { image: id, address: address.wrapping_add(1) };
            return (frame, Ok(NATIVE.thread_start()));
        }
        self.images.keep(id);
        let Some(unwind) = self.images.unwind(id) else {
            return (frame, Err(RuleRefusal::Unreadable));
        };
        let rule = |address| {
            self.images
                .get(id)
                .map_or(Err(RuleRefusal::Unreadable), |image| image.rule(&unwind, address))
        };
        // The signal-return stub ends with its system call: in it, the next instruction is past the
        // stub's table entry.
        let in_signal_return = || {
            let before = address.checked_sub(1).filter(|_| exact)?;
            rule(before).ok().filter(|found| found.rule.kind == FrameKind::Signal)
        };
        let found = rule(address);
        let found = match found {
            Err(RuleRefusal::NoEntry) => in_signal_return().ok_or(RuleRefusal::NoEntry),
            found => found,
        };
        let found = match found {
            Ok(found) => found,
            Err(RuleRefusal::NoEntry)
                if self.images.get(id).is_some_and(|i| i.is_loaders_start(address)) =>
            {
                return (frame, Ok(NATIVE.thread_start()));
            }
            Err(RuleRefusal::NoEntry) if exact && unwind.is_plt(address) => {
                return (frame, (NATIVE.stub)(&self.code(id, offset), address));
            }
            Err(refusal) => {
                if !exact && self.is_hijack(id, offset.wrapping_add(1)) {
                    let start = address.wrapping_add(1);
                    return (FrameKey::Native { image: id, address: start }, Err(refusal));
                }
                let rule = match refusal {
                    RuleRefusal::NoEntry => {
                        self.by_code(id, address.wrapping_add(u64::from(!exact)), exact)
                    }
                    _ => Err(refusal),
                };
                return (frame, rule);
            }
        };
        let function = &found.function;
        if self.is_hijack(id, offset.wrapping_sub(address - function.start)) {
            return (frame, (NATIVE.hijack)(found.rule, address - function.start));
        }
        // A return address that is the first instruction of `OnHijackTripThread` belongs to that,
        // not to the function before it.
        if !exact
            && function.end == address.wrapping_add(1)
            && self.is_hijack(id, offset.wrapping_add(1))
        {
            return (
                FrameKey::Native { image: id, address: function.end },
                Err(RuleRefusal::Unsupported),
            );
        }
        if exact
            && found.saves_below_stack()
            && let Some(rule) = (NATIVE.epilogue)(&self.code(id, offset), address, function)
        {
            return (frame, Ok(rule));
        }
        (frame, Ok(found.rule))
    }

    /// The rule of the frame whose next instruction is at `address` of an ELF image that has no
    /// unwind data for it.
    fn by_code(&self, id: ImageId, address: u64, exact: bool) -> Result<Rule, RuleRefusal> {
        let (Some(decoder), Some(image)) = (NATIVE.body, self.images.get(id)) else {
            return Err(RuleRefusal::NoEntry);
        };
        let mut read = |address: u64, into: &mut [u8]| image.read_code(address, into);
        if image.entry().is_some_and(|entry| (decoder.is_behind_entry)(&mut read, entry, address)) {
            return Ok(NATIVE.thread_start());
        }
        (decoder.rule)(&mut read, address, exact)
    }

    fn code(&self, id: ImageId, offset: u64) -> Vec<u8> {
        let mut code = vec![0u8; CODE_BYTES];
        let length = self.images.get(id).map_or(0, |i| i.read_at(offset, &mut code));
        code.truncate(length);
        code
    }

    /// True when the function that begins at `offset` in the file is the CLR's return-address
    /// hijack.
    fn is_hijack(&self, id: ImageId, offset: u64) -> bool {
        let mut code = [0u8; 16];
        let Some(code) = code.get_mut(..NATIVE.hijack_prologue.len()) else { return false };
        self.process.is_clr
            && !code.is_empty()
            && self.images.get(id).is_some_and(|i| i.read_at(offset, code) == code.len())
            && code == NATIVE.hijack_prologue
    }

    fn in_vdso(
        &mut self,
        mapping: &Mapping,
        pc: u64,
        exact: bool,
    ) -> (FrameKey, Result<Rule, RuleRefusal>) {
        if self.process.vdso.is_none() {
            let length = (mapping.range.end - mapping.range.start).min(MAX_VDSO_BYTES);
            let mut bytes = vec![0u8; usize::try_from(length).unwrap_or(0)];
            if self.process.read(mapping.range.start, &mut bytes) == bytes.len() {
                self.process.vdso = self.images.vdso(bytes).ok();
            }
        }
        let Some(id) = self.process.vdso else {
            return (self.unknown(pc), Err(RuleRefusal::Unreadable));
        };
        let offset = pc - mapping.range.start;
        let Some(address) = self.images.get(id).and_then(|i| i.elf_address(offset)) else {
            return (self.unknown(pc), Err(RuleRefusal::NoEntry));
        };
        self.in_elf(id, address, offset, exact)
    }

    /// Whether a known body covers `pc`; it is looked at again when that is due.
    fn has_body(&mut self, pc: u64) -> Result<bool, RuleRefusal> {
        let Some((start, known)) = self.process.body_at(pc) else { return Ok(false) };
        let (checked, holds) = (known.checked, known.holds(self.now));
        if let Some(known) = self.process.bodies.get_mut(&start) {
            known.is_used = true;
        }
        if holds {
            return Ok(true);
        }
        match self.look_at_bodies(start) {
            Some(is_current) => Ok(is_current),
            None if self.holds_unseen(checked) => Ok(true),
            None => Err(RuleRefusal::Unreadable),
        }
    }

    /// Looks whether the body at `first` is still there, and with it at others that are met as
    /// often, as long as there is time: a look costs less than to hand it over to the thread that
    /// may be held up by it. The answer is the first one's, `None` when it could not be seen.
    fn look_at_bodies(&mut self, first: u64) -> Option<bool> {
        let soon = |known: &CachedBody| {
            known.is_used && self.now.duration_since(known.checked) >= RECHECK / 2
        };
        let others =
            self.process.bodies.iter().filter(|(start, known)| **start != first && soon(known));
        let bodies: Vec<(u64, JitBody)> = self
            .process
            .bodies
            .get_key_value(&first)
            .into_iter()
            .chain(others)
            .take(BODIES_AT_ONCE)
            .map(|(start, known)| (*start, known.body.clone()))
            .collect();
        let seen =
            self.process.memory()?.with(move |memory| looks(bodies, memory, TIME_AT_ONCE))?;
        let mut answer = None;
        for (start, is_current, range) in seen {
            if start == first {
                answer = is_current;
            }
            match is_current {
                Some(true) => {
                    if let Some(known) = self.process.bodies.get_mut(&start) {
                        (known.checked, known.is_used) = (self.now, start == first);
                    }
                }
                Some(false) => {
                    self.counters.bodies_replaced += 1;
                    self.process.forget(&range);
                }
                // One that cannot be seen takes no other one's place in the next batch before it is
                // met again.
                None => {
                    if let Some(known) = self.process.bodies.get_mut(&start) {
                        known.is_used = false;
                    }
                }
            }
        }
        answer
    }

    /// Whether a frame found at `pc` before is still that: the body it is of is still there. Its
    /// rule is then what it was, for the runtime writes the code of a body once, and unwind data
    /// are what a body is told by.
    fn still_holds(&mut self, pc: u64, frame: FrameKey) -> Option<Instant> {
        let FrameKey::Managed { start, generation, .. } = frame else { return None };
        // Most bodies were looked at with another one: to find that costs less than to measure what
        // it costs.
        let due = self.process.body_at(pc).is_some_and(|(_, known)| !known.holds(self.now));
        let has_body = |view: &mut Self| view.has_body(pc);
        let found = if due { self.within_budget(has_body)? } else { has_body(self) };
        if found != Ok(true) {
            return None;
        }
        let (found, known) = self.process.body_at(pc)?;
        (found == start && known.generation == generation).then_some(known.checked)
    }

    /// Whether a look at JIT memory still holds although none can be had now. The memory of a
    /// process that has ended is what it was.
    fn holds_unseen(&self, checked: Instant) -> bool {
        self.now.duration_since(checked) < UNSEEN || !self.process.is_alive()
    }

    fn in_jit(
        &mut self,
        mapping: &Mapping,
        pc: u64,
        exact: bool,
    ) -> (FrameKey, Result<Rule, RuleRefusal>) {
        let known = match self.has_body(pc) {
            Ok(known) => known,
            Err(refusal) => return (self.unknown(pc), Err(refusal)),
        };
        if !known {
            let mut budget = self.process.budget;
            let Some(memory) = self.process.memory() else {
                return (self.unknown(pc), Err(RuleRefusal::Unreadable));
            };
            let start = mapping.range.start;
            let found = memory.with(move |memory| {
                let found = JitBody::find(NATIVE, memory, pc, start, &mut budget);
                (found, budget)
            });
            let Some((found, budget)) = found else {
                return (self.unknown(pc), Err(RuleRefusal::Unreadable));
            };
            self.process.budget = budget;
            match found {
                Ok(Some(body)) => self.learn(body),
                Ok(None) => {
                    let mut code = [0u8; CODE_BYTES];
                    let length = self.process.read(pc, &mut code);
                    return self.stub(pc, code.get(..length).unwrap_or_default());
                }
                Err(refusal) => return (self.unknown(pc), Err(refusal)),
            }
        }
        let Some((start, known)) = self.process.bodies.range(..=pc).next_back() else {
            return (self.unknown(pc), Err(RuleRefusal::NoEntry));
        };
        let frame = FrameKey::Managed {
            process: self.process.id,
            start: *start,
            generation: known.generation,
        };
        let rule = match &self.process.memory {
            Some(memory) => known.body.rule(NATIVE, memory, pc, exact),
            None => known.body.rule(NATIVE, &NoMemory, pc, exact),
        };
        (frame, rule)
    }

    pub(super) fn learn(&mut self, body: JitBody) {
        let process = &mut *self.process;
        // A body that was known in this range and is not there any more was replaced.
        if !process.bodies_in(&body.range).is_empty() {
            process.forget(&body.range);
        }
        if process.bodies.len() >= MAX_BODIES {
            process.evict_bodies();
            self.counters.steps_cleared += 1;
        }
        let start = body.range.start;
        let generation = match process.former.remove(&start) {
            None => process.oldest_generation,
            Some(former) if former.print == Some(print(&body)) => former.generation,
            Some(former) => former.next(),
        };
        process.forget_former(body.range.clone());
        process
            .bodies
            .insert(start, CachedBody { body, generation, checked: self.now, is_used: true });
    }

    fn stub(&self, pc: u64, code: &[u8]) -> (FrameKey, Result<Rule, RuleRefusal>) {
        let frame = FrameKey::Stub { process: self.process.id, address: pc };
        let rule =
            if code.is_empty() { Err(RuleRefusal::Unreadable) } else { (NATIVE.stub)(code, pc) };
        (frame, rule)
    }

    /// Does what the process's share of work has room for.
    fn within_budget<T>(&mut self, work: impl FnOnce(&mut Self) -> T) -> Option<T> {
        self.process.refill(self.common, self.now);
        if !self.common.has_time(&self.process.share) {
            return None;
        }
        let before = cpu_time();
        let done = work(self);
        self.common.spend(&mut self.process.share, cpu_time().saturating_sub(before));
        Some(done)
    }

    /// [`View::resolve`] within the process's share of work.
    fn resolve_within_budget(
        &mut self,
        pc: u64,
        exact: bool,
    ) -> (FrameKey, Result<Rule, RuleRefusal>) {
        let found = self
            .within_budget(|view| view.resolve(pc, exact))
            .unwrap_or_else(|| (self.unknown(pc), Err(RuleRefusal::Budget)));
        self.counters.budget_refusals += u64::from(matches!(found.1, Err(RuleRefusal::Budget)));
        found
    }
}

impl CodeView<'_> {
    /// Teaches the probes the rule of a remembered step, if they can use it.
    fn teach(&mut self, place: u64) {
        let again = std::mem::replace(&mut self.teaching, RulePush::New) == RulePush::Again;
        let Some(cached) = self.process.steps.get_mut(&place) else { return };
        if cached.taught.is_some() && !again {
            return;
        }
        let Some(rule) = cached.step.rule.as_ref().ok().and_then(|rule| encode(NATIVE, rule))
        else {
            return;
        };
        if !self.common.take_lesson(&mut self.process.share) {
            self.counters.lessons_refused += 1;
            return;
        }
        // Of a rule they seem to have lost, samples may be on the way that were walked before they
        // did.
        if cached.taught.is_none() {
            cached.taught = Some(ON_ITS_WAY);
            self.process.on_their_way.push(place);
            self.lessons.touches(self.process.pid);
        }
        let pid = self.process.pid;
        let space = *self.process.space.get_or_insert_with(|| {
            let space = self.lessons.new_space();
            self.lessons.push(RuleUpdate::Space { pid, space });
            space
        });
        // What was unlearned before may be the rule of this very place.
        self.process.take_back(self.lessons);
        self.lessons.push(RuleUpdate::Rule { key: rule_update::key(space, place), rule });
        self.counters.lessons += 1;
    }

    /// The step at a place: the remembered one while it holds.
    fn look_up(&mut self, pc: u64, exact: bool) -> FrameRule {
        let key = place(pc, exact);
        // Such an address is in no mapping, and its key would be another's.
        if pc >> 63 != 0 {
            return FrameRule { frame: self.unknown(pc), rule: Err(RuleRefusal::NoEntry) };
        }
        if let Some(cached) = self.process.steps.get(&key) {
            if cached.holds(self.now) {
                return cached.step.clone();
            }
            // Why there was none may be over.
            let frame = cached.step.rule.is_ok().then_some(cached.step.frame);
            if let Some(frame) = frame
                && let Some(looked) = self.still_holds(pc, frame)
                && let Some(cached) = self.process.steps.get_mut(&key)
            {
                cached.checked = Some(looked);
                return cached.step.clone();
            }
        }
        let (frame, rule) = self.resolve_within_budget(pc, exact);
        let step = FrameRule { frame, rule: rule.map(|rule| self.intern(rule)) };
        let lasting = !matches!(step.rule, Err(RuleRefusal::Budget | RuleRefusal::Unreadable));
        // What cannot be looked at again, because the process ended or had its share, is still what
        // it was. Only JIT memory is.
        if !lasting && let Some(cached) = self.process.steps.get(&key) {
            let seen = self.process.body_at(pc).map(|(_, known)| known.checked).or(cached.checked);
            if step.rule == Err(RuleRefusal::Budget)
                || seen.is_none_or(|seen| self.holds_unseen(seen))
            {
                return cached.step.clone();
            }
        }
        // What could not be looked at may be there next time; addresses outside all mappings are
        // not worth a place.
        if lasting && self.process.mappings.find(pc).is_some() {
            if self.process.steps.len() >= MAX_STEPS {
                self.process.evict_steps();
                self.counters.steps_cleared += 1;
            }
            let jit = self
                .process
                .mappings
                .find(pc)
                .is_some_and(|m| matches!(m.region, MappingKind::Jit { .. }));
            let cached =
                CachedStep { step: step.clone(), checked: jit.then_some(self.now), taught: None };
            let old = self.process.steps.insert(key, cached);
            if old.as_ref().is_some_and(|old| old.step != step) {
                self.process.code_is_replaced();
            }
            if let Some(old) = old.filter(|old| old.taught.is_some()) {
                if old.step == step
                    && let Some(cached) = self.process.steps.get_mut(&key)
                {
                    cached.taught = old.taught;
                } else {
                    self.process.unlearned.push(key);
                }
            }
        }
        step
    }
}

/// Key of a step, which is `RuleKey::place` too.
fn place(pc: u64, exact: bool) -> u64 {
    pc << 1 | u64::from(exact)
}

impl CodeLookup for CodeView<'_> {
    fn step(&mut self, pc: u64, exact: bool) -> FrameRule {
        let step = self.look_up(pc, exact);
        if self.teaching != RulePush::Off {
            self.teach(place(pc, exact));
        }
        step
    }

    fn walked(&mut self, pc: u64, exact: bool, time: MonotonicNs) -> Option<FrameKey> {
        let key = place(pc, exact);
        // Nearly always: a remembered step that holds.
        let mut cached = self.process.steps.get(&key);
        let frame = match cached.filter(|cached| cached.holds(self.now)) {
            Some(cached) => cached.step.frame,
            None => {
                let step = self.look_up(pc, exact);
                cached = self.process.steps.get(&key);
                // It cannot be seen whether the rule still holds.
                if cached.is_some_and(|cached| cached.step != step) {
                    return None;
                }
                step.frame
            }
        };
        // Taken back, or taught later: then the probes used a rule of code that is not there any
        // more, or one that was dropped for want of room; the latter for certain where no code was
        // replaced shortly before.
        let taught = cached.and_then(|cached| cached.taught);
        (taught.is_some_and(|taught| taught <= time) || self.process.is_unreplaced(time))
            .then_some(frame)
    }

    fn is_executable(&mut self, address: u64) -> bool {
        self.process.mappings.find(address).is_some()
    }

    fn follows_call(&mut self, address: u64) -> Option<bool> {
        let follows = self.within_budget(|view| view.is_behind_call(address));
        self.counters.budget_refusals += u64::from(follows.is_none());
        follows.flatten()
    }

    /// Asked of what [`Code::follows_call`] was just asked.
    fn call_target(&mut self, address: u64) -> Option<u64> {
        let mapping = self.process.mappings.find(address.wrapping_sub(1)).cloned()?;
        (NATIVE.call_target)(&self.code_before(&mapping, address)?, address)
    }

    /// Of a thread that still sleeps where it did.
    fn stack(&mut self, address: u64) -> Option<Vec<u8>> {
        let BlockedThread { tid, exec_ns } = self.asleep?;
        let piece = self.within_budget(|view| {
            let pid = view.process.pid;
            // Before, lest those be read that are gone already, and behind it, which says that it
            // is true.
            let sleeps = || still_sleeps(pid, tid, exec_ns);
            let mut bytes = vec![0; STACK_PIECE_BYTES];
            let length = if sleeps() { view.process.read(address, &mut bytes) } else { 0 };
            bytes.truncate(length);
            (length > 0 && sleeps()).then_some(bytes)
        });
        self.counters.budget_refusals += u64::from(piece.is_none());
        let piece = piece.flatten();
        self.counters.stack_pieces += u64::from(piece.is_some());
        piece
    }
}

impl CodeView<'_> {
    /// `None` when the code before `address` could not be read.
    fn is_behind_call(&mut self, address: u64) -> Option<bool> {
        let Some(mapping) = self.process.mappings.find(address.wrapping_sub(1)).cloned() else {
            return Some(false);
        };
        self.code_before(&mapping, address).map(|code| (NATIVE.ends_with_call)(&code))
    }

    /// The bytes before `address` in a mapping.
    fn code_before(&mut self, mapping: &Mapping, address: u64) -> Option<[u8; 8]> {
        let (start, mut code) = (mapping.range.start, [0u8; 8]);
        let from = address.wrapping_sub(8);
        if self.read_code(mapping, from, &mut code) < code.len() {
            // The mapping may begin so shortly before: with zeros in front of it, none of which a
            // call can begin with.
            code = [0; 8];
            let missing = usize::try_from(start.checked_sub(from)?).ok()?;
            let there = code.get_mut(missing..)?;
            if self.read_code(mapping, start, there) < there.len() {
                return None;
            }
        }
        Some(code)
    }

    /// Reads from `address` on, which is in a mapping or shortly before it.
    fn read_code(&mut self, mapping: &Mapping, address: u64, into: &mut [u8]) -> usize {
        if mapping.region != MappingKind::File {
            return self.process.read(address, into);
        }
        if !mapping.range.contains(&address) {
            return 0;
        }
        let image = self.image(mapping).and_then(|id| self.images.get(id));
        image.map_or(0, |image| image.read_at(mapping.file_offset_of(address), into))
    }
}

/// Executable mappings of a process; a line that does not parse is left out.
pub(super) fn read_maps(pid: u32) -> Result<Vec<Mapping>, ProcessError> {
    let text = maps_text(pid)?;
    let lines = text.split(|&b| b == b'\n').map(String::from_utf8_lossy);
    Ok(lines
        .filter_map(|line| parse_maps_line(pid, &line))
        .filter_map(|m| Mapping::new(&m))
        .collect())
}

/// `/proc/PID/maps`, as far as it is read.
pub(super) fn maps_text(pid: u32) -> Result<Vec<u8>, ProcessError> {
    let path = format!("{}/maps", super::in_common(pid));
    let file = path.clone();
    let text = wait_for(IoPeer::Process(pid), move || {
        let mut text = Vec::new();
        std::fs::File::open(&file)?.take(MAX_MAPS_BYTES).read_to_end(&mut text).map(|_| text)
    });
    let text = text.unwrap_or_else(|| Err(ErrorKind::TimedOut.into()));
    text.map_err(|source| ProcessError::Read { pid, path, source })
}

#[cfg(test)]
mod tests {
    use super::*;
    use perfusion_model::event::Mmap;

    #[test]
    fn a_full_cache_drops_some_places_and_the_rules_of_those_only() {
        let mmap = Mmap {
            pid: 1,
            start: 0,
            len: 1 << 30,
            file_offset: 0,
            device: (0, 0),
            inode: 0,
            path: String::new(),
        };
        let mut mappings = Mappings::default();
        mappings.insert(Mapping::new(&mmap).unwrap());
        let mut process = LiveProcess::new(ProcessId(0), 1, None, Arc::new(mappings));
        let step = FrameRule {
            frame: FrameKey::Unknown { process: process.id, address: 0 },
            rule: Ok(Arc::new(NATIVE.frameless())),
        };
        // A quarter of a quarter where threads were interrupted, all others callers.
        let (quarter, now) = (MAX_STEPS / DROPPED_PART, MonotonicNs::now());
        let exact = quarter / 4;
        for n in 0..MAX_STEPS {
            let taught = (n % 2 == 0).then_some(now);
            let key = place(n as u64, n < exact);
            process.steps.insert(key, CachedStep { step: step.clone(), checked: None, taught });
        }
        process.space = Some(1);
        let (mut counters, mut lessons) = (ProcessTableCounters::default(), RuleUpdates::default());
        let mut view = CodeView {
            process: &mut process,
            images: &mut ImageCache::default(),
            rules: &mut HashSet::new(),
            counters: &mut counters,
            lessons: &mut lessons,
            common: &mut CommonBudget::default(),
            now: Instant::now() + Duration::from_secs(1),
            teaching: RulePush::Off,
            asleep: None,
        };
        view.look_up(0x1_0000, true);
        assert_eq!(view.process.steps.len(), MAX_STEPS - quarter + 1);
        assert!((0..exact as u64).all(|n| !view.process.steps.contains_key(&place(n, true))));
        view.process.take_back(view.lessons);
        let lessons = view.lessons.take().0;
        assert!(
            lessons.iter().all(|lesson| matches!(lesson, RuleUpdate::Forget { .. })),
            "no space is closed"
        );
        assert!(lessons.len() > exact / 4 && lessons.len() <= quarter);
        assert_eq!(view.counters.steps_cleared, 1);
        // What the probes have walked by one that was dropped is a frame all the same.
        assert!(view.walked(0, true, now).is_some());
        // A rule counts from when it has come to the probes, not from when it was taught: until
        // then they go by another one.
        let waiting = CachedStep { step, checked: None, taught: None };
        view.process.steps.insert(place(0x10, false), waiting);
        view.process.forget(&(0x2000..0x2001));
        view.teach(place(0x10, false));
        assert!(view.walked(0x10, false, MonotonicNs::now()).is_none());
        let (lessons, touched) = view.lessons.take();
        assert!(matches!(lessons[..], [RuleUpdate::Rule { .. }]) && touched.contains(&1));
        view.process.lessons_arrived(MonotonicNs::now());
        assert!(view.walked(0x10, false, MonotonicNs::now()).is_some());
        // No time to look is no answer, and neither is memory that is not to be had.
        assert_eq!(view.follows_call(2 << 30), Some(false), "nothing is there");
        assert_eq!(view.follows_call(0x20), None);
        assert_eq!(view.counters.budget_refusals, 0);
        view.common.spend(&mut view.process.share, Duration::from_secs(60));
        assert_eq!(view.follows_call(0x20), None);
        view.process.forget(&(0x2000..0x2001));
        assert!(
            view.walked(2, true, MonotonicNs::now()).is_none(),
            "code was replaced a moment ago"
        );
    }

    /// Memory with the same word everywhere, which takes its time.
    struct Slow(Duration);

    impl TargetMemory for Slow {
        fn read(&self, _address: u64, into: &mut [u8]) -> usize {
            std::thread::sleep(self.0);
            into.fill(0);
            into.len()
        }
    }

    #[test]
    fn a_batch_of_looks_ends_when_its_time_does_but_not_before_the_first() {
        let body = |n: u64| (n << 12, JitBody::without_entries(n << 12..(n << 12) + 0x100, n));
        let batch = || (1..=BODIES_AT_ONCE as u64).map(body).collect::<Vec<_>>();
        let pause = Duration::from_millis(5);
        let seen = looks(batch(), &Slow(pause), 4 * pause);
        assert!((1..=4).contains(&seen.len()) && seen[0].0 == 1 << 12, "{seen:?}");
        assert_eq!(looks(batch(), &Slow(pause), Duration::ZERO).len(), 1);
        assert_eq!(
            looks(batch(), &Slow(Duration::ZERO), Duration::from_secs(60)).len(),
            BODIES_AT_ONCE
        );
    }

    #[test]
    fn bodies_that_cannot_be_seen_do_not_fill_the_next_batch() {
        let pid = std::process::id();
        let mut process =
            LiveProcess::new(ProcessId(0), pid, crate::process::start_ticks(pid), Arc::default());
        let looked = Instant::now();
        let known = |start: u64| CachedBody {
            body: JitBody::without_entries(start..start + 0x100, 1),
            generation: 0,
            checked: looked,
            is_used: true,
        };
        // Where nothing is.
        let starts: Vec<u64> = (1..=2 * BODIES_AT_ONCE as u64).map(|n| n << 12).collect();
        starts.iter().for_each(|start| drop(process.bodies.insert(*start, known(*start))));
        let (images, rules) = (&mut ImageCache::default(), &mut HashSet::new());
        let (counters, lessons) =
            (&mut ProcessTableCounters::default(), &mut RuleUpdates::default());
        let (process, common) = (&mut process, &mut CommonBudget::default());
        let (now, teaching) = (looked + RECHECK, RulePush::Off);
        let mut view = CodeView {
            process,
            images,
            rules,
            counters,
            lessons,
            common,
            now,
            teaching,
            asleep: None,
        };
        let used = |view: &CodeView<'_>| {
            view.process.bodies.values().filter(|known| known.is_used).count()
        };
        for _ in 0..2 * BODIES_AT_ONCE {
            let Some((first, _)) = view.process.bodies.iter().find(|(_, known)| known.is_used)
            else {
                break;
            };
            let (first, before) = (*first, used(&view));
            assert_eq!(view.look_at_bodies(first), None);
            assert!(used(&view) < before, "none of them comes again before it is met");
        }
        assert_eq!(used(&view), 0);
    }

    #[test]
    fn why_there_was_no_rule_is_found_out_again() {
        let pid = std::process::id();
        let mmap = Mmap {
            pid,
            start: 0x1_0000,
            len: 0x1_0000,
            file_offset: 0,
            device: (0, 0),
            inode: 0,
            path: "//anon".into(),
        };
        let mut mappings = Mappings::default();
        mappings.insert(Mapping::new(&mmap).unwrap());
        let mut process = LiveProcess::new(ProcessId(0), pid, None, Arc::new(mappings));
        process.is_clr = true;
        let (start, looked) = (0x1_1000, Instant::now());
        // The body was just looked at and is there; the steps in it were found a while ago.
        let known = CachedBody {
            body: JitBody::without_entries(start..start + 0x100, 1),
            generation: 0,
            checked: looked + RECHECK,
            is_used: false,
        };
        process.bodies.insert(start, known);
        let frame = FrameKey::Managed { process: process.id, start, generation: 0 };
        let [found, not] = [Ok(Arc::new(NATIVE.frameless())), Err(RuleRefusal::Unsupported)];
        for (pc, rule) in [(start + 0x10, found), (start + 0x20, not)] {
            let step = FrameRule { frame, rule };
            process
                .steps
                .insert(place(pc, false), CachedStep { step, checked: Some(looked), taught: None });
        }
        let (images, rules) = (&mut ImageCache::default(), &mut HashSet::new());
        let (counters, lessons) =
            (&mut ProcessTableCounters::default(), &mut RuleUpdates::default());
        let (process, common) = (&mut process, &mut CommonBudget::default());
        let (now, teaching) = (looked + RECHECK, RulePush::Off);
        let mut view = CodeView {
            process,
            images,
            rules,
            counters,
            lessons,
            common,
            now,
            teaching,
            asleep: None,
        };
        assert!(view.look_up(start + 0x10, false).rule.is_ok(), "not derived again");
        let again = view.look_up(start + 0x20, false);
        assert!(again.rule.is_err() && again.rule != Err(RuleRefusal::Unsupported), "{again:?}");
    }

    #[test]
    fn code_that_cannot_be_looked_at_again_is_not_taken_for_the_same_while_its_process_lives() {
        let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let pid = child.id();
        // As far as is known there is code; nothing of it can be read, for there is nothing.
        let mmap = Mmap {
            pid,
            start: 0x1_0000,
            len: 0x1_0000,
            file_offset: 0,
            device: (0, 0),
            inode: 0,
            path: "//anon".into(),
        };
        let mut mappings = Mappings::default();
        mappings.insert(Mapping::new(&mmap).unwrap());
        let ticks = crate::process::start_ticks(pid);
        let mut process = LiveProcess::new(ProcessId(0), pid, ticks, Arc::new(mappings));
        process.is_clr = true;
        let (start, pc, looked) = (0x1_1000, 0x1_1010, Instant::now());
        let body = JitBody::without_entries(start..start + 0x100, 1);
        process
            .bodies
            .insert(start, CachedBody { body, generation: 0, checked: looked, is_used: false });
        let frame = FrameKey::Managed { process: process.id, start, generation: 0 };
        let step = FrameRule { frame, rule: Ok(Arc::new(NATIVE.frameless())) };
        let cached =
            CachedStep { step: step.clone(), checked: Some(looked), taught: Some(MonotonicNs(0)) };
        process.steps.insert(place(pc, false), cached);
        let (images, rules) = (&mut ImageCache::default(), &mut HashSet::new());
        let (counters, lessons) =
            (&mut ProcessTableCounters::default(), &mut RuleUpdates::default());
        let (process, common) = (&mut process, &mut CommonBudget::default());
        let (now, teaching) = (looked + RECHECK, RulePush::Off);
        let mut view = CodeView {
            process,
            images,
            rules,
            counters,
            lessons,
            common,
            now,
            teaching,
            asleep: None,
        };
        assert_eq!(view.has_body(pc), Ok(true), "for a moment it is");
        view.now = looked + UNSEEN;
        let unseen = view.look_up(pc, false);
        assert_eq!(
            unseen,
            FrameRule { frame: view.unknown(pc), rule: Err(RuleRefusal::Unreadable) }
        );
        assert_eq!(view.walked(pc, false, MonotonicNs::now()), None);
        assert_eq!(view.process.bodies[&start].checked, looked, "nobody has looked");
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(view.has_body(pc), Ok(true), "of a process that has ended it is what it was");
    }
}
