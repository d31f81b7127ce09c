//! The instance's own thread: watches the lease, answers requests, names types, has the EventPipe
//! session started and ended, detaches. A native thread: the runtime answers questions here that it
//! refuses inside its callbacks (.NET 8 and 9).

use crate::code::seen_at;
use crate::gate::NO_CODE;
use crate::instance::{Instance, phase};
use crate::method::{NamedMethod, Namer};
use crate::recorder;
use crate::runtime::info::{Info, Mask};
use crate::syscall;
use crate::type_name::NameText;
use core::sync::atomic::Ordering;
use profiler_protocol::counter::Counter;
use profiler_protocol::layout::InstanceState;
use profiler_protocol::lease::{Lease, LeaseState};
use profiler_protocol::load;
use profiler_protocol::record::{IlMapList, NOT_NOW, RecordBody, WordList};
use profiler_protocol::request::{Request, RequestReader};

/// How often requests are looked for: while questions come (and for a while after one was withheld,
/// which is asked again with the next sample, and that before the next unload), while somebody
/// listens, while somebody does and nothing has been said or asked for a while, while nobody does.
const BUSY_NS: u64 = 2_000_000;
const WITHHELD_NS: u64 = 200_000_000;
const LISTENING_NS: u64 = 10_000_000;
const SILENT_NS: u64 = 50_000_000;
const SILENT_AFTER_NS: u64 = 500_000_000;
const QUIET_NS: u64 = 100_000_000;
/// The end of a process looks for last questions so often.
const LAST_PAUSE_NS: u64 = 500_000;
/// Between two looks for newly loaded images, when questions are withheld.
const IMAGES_NS: u64 = 1_000_000_000;
/// Requests answered before the lease is looked at again.
const BATCH: u32 = 256;
/// How long callbacks that began before the session ended may take to leave.
const DRAIN_NS: u64 = 5_000_000;
const DRAIN_LOOKS: u32 = 200;
/// Between two tries to start or end a session when the first did not work.
const RETRY_NS: u64 = 1_000_000_000;

/// Calls the reader of the ring, by giving this thread its name: the kernel tells perf's listeners
/// of each name that a thread is given, also of the one it has (PERF_RECORD_COMM;
/// `__set_task_comm`, fs/exec.c), and whoever records processes listens.
fn ring() {
    syscall::name_thread(c"perfusion-shim");
}

/// What the loop does next.
#[derive(Clone, Copy, PartialEq, Eq)]
enum NextStep {
    Work,
    Detach,
}

struct ServiceThread<'a> {
    instance: &'a Instance,
    type_named: Option<TypeNamed>,
    namer: Namer,
    info: Info,
    lease: Lease,
    requests: RequestReader,
    named: NamedMethod,
    /// A question has been answered, and a mark heard, since the last mark was made.
    asked: bool,
    heard: bool,
    /// A question that could not be answered because something was unloading: the address, and when
    /// it was seen.
    put_off: Option<(u64, u64)>,
    /// No session is started or ended again before this moment.
    retry_ns: u64,
    /// When images were noted last, and whether a question has been withheld since.
    images_ns: u64,
    withheld: bool,
    /// When an answer was withheld last.
    withheld_ns: u64,
    activity: RingActivity,
}

/// When the ring was written to.
#[derive(Default)]
struct RingActivity {
    /// Units that had been written when that was looked at last.
    written: u64,
    /// When that was found to have changed.
    changed_ns: u64,
}

impl RingActivity {
    /// True when nothing has been written for a while.
    fn is_silent(&mut self, written: u64, now_ns: u64) -> bool {
        if self.written != written {
            *self = Self { written, changed_ns: now_ns };
        }
        now_ns.saturating_sub(self.changed_ns) > SILENT_AFTER_NS
    }
}

/// Hears the name of a type: ClassID, ModuleID, name and module.
pub(crate) type TypeNamed = fn(usize, usize, &str, &str);

/// The thread's whole life. Returns when the process ends or the detach is under way.
pub(crate) fn run(instance: &Instance, type_named: Option<TypeNamed>) {
    ring();
    let Some(info) = instance.info() else { return };
    let mut service = ServiceThread {
        instance,
        type_named,
        namer: Namer::new(info),
        info,
        lease: Lease::new(syscall::now_ns()),
        requests: RequestReader::new(),
        named: NamedMethod::new(),
        asked: false,
        heard: false,
        put_off: None,
        retry_ns: 0,
        images_ns: 0,
        withheld: false,
        withheld_ns: 0,
        activity: RingActivity::default(),
    };
    // Stacks of threads that sleep are older than the attach; what they are in is mostly images.
    service.note_images();
    // Loaded by environment, the session is running since Initialize, and samples have been told.
    service.match_session();
    instance.region().set_state(InstanceState::Ready);
    loop {
        match instance.service.phase.load(Ordering::Acquire) {
            phase::WORK => {}
            phase::CLOSING => return service.farewell(),
            _ => return,
        }
        let answered = match service.round() {
            (NextStep::Detach, _) => match service.detach() {
                true => return,
                false => 0,
            },
            (NextStep::Work, answered) => answered,
        };
        let pause = match (answered, instance.is_listening()) {
            (1.., _) => BUSY_NS,
            (0, true) if service.is_in_a_hurry() => BUSY_NS,
            (0, true) if service.is_silent() => SILENT_NS,
            (0, true) => LISTENING_NS,
            (0, false) => QUIET_NS,
        };
        syscall::wait(&instance.service.phase, phase::WORK, pause);
    }
}

impl ServiceThread<'_> {
    /// Somebody listens again: say so before anything else, then start the session. Without room to
    /// say so, the next round tries again.
    fn begin(&mut self) {
        self.release_handles();
        self.instance.types.forget();
        self.instance.contentions.open.forget();
        self.instance.gc.forget();
        self.instance.workers.store(0, Ordering::Relaxed);
        if self.instance.say_hello() {
            self.instance.set_listening(true);
            self.retry_ns = 0;
            self.match_session();
            self.note_images();
        }
    }

    /// True when nothing has been written for a while, answers to questions among it.
    fn is_silent(&mut self) -> bool {
        self.activity.is_silent(self.instance.region().reserved(), syscall::now_ns())
    }

    fn is_in_a_hurry(&self) -> bool {
        self.withheld_ns != 0 && syscall::now_ns().saturating_sub(self.withheld_ns) < WITHHELD_NS
    }

    /// Notes where code is that stays whatever is unloaded.
    fn note_images(&mut self) {
        self.images_ns = syscall::now_ns();
        let (code, namer) = (&self.instance.code.lifetimes, &self.namer);
        let note =
            || namer.lasting_images(|base, bytes| code.image_lasts(base as u64, bytes as u64));
        // While something unloads there is no looking; the next question that is withheld leads
        // here again.
        self.instance.code.gate.look_up(NO_CODE, note);
    }

    /// Nobody listens: nothing is produced any more.
    fn quiet(&mut self) {
        self.instance.set_listening(false);
        self.retry_ns = 0;
        self.match_session();
        self.release_handles();
    }

    /// Has a session run while somebody listens, and none while nobody does. What did not work is
    /// tried again after a while.
    fn match_session(&mut self) {
        let running = self.instance.has_session();
        let now_ns = syscall::now_ns();
        if running == self.instance.is_listening() || now_ns < self.retry_ns {
            return;
        }
        self.retry_ns = now_ns.saturating_add(RETRY_NS);
        if running {
            self.apart(|instance, info| instance.stop_session(info));
        } else {
            self.apart(|instance, info| instance.start_session(info));
        }
    }

    /// Starts or ends a session on a passing thread. Both run managed code (the event source's own
    /// callback), and from then on the runtime takes the thread for one of its own: outside of
    /// callbacks it answers 0x80131363 to it for ever, and this thread has questions to ask
    /// (`PROFILER_TO_CLR_ENTRYPOINT_SYNC`, vm/proftoeeinterfaceimpl.inl).
    fn apart(&self, work: fn(&Instance, Info)) {
        let call = (self.instance, work);
        let done = syscall::run_apart(
            |(instance, work): &(&Instance, fn(&Instance, Info))| {
                if let Some(info) = instance.info() {
                    work(instance, info);
                }
            },
            &call,
        );
        if !done {
            self.instance.count(Counter::SessionsRefused);
        }
    }

    fn release_handles(&self) {
        if !self.info.has_handles() {
            return;
        }
        for _ in 0..DRAIN_LOOKS {
            // A survey holds the slots for less than a millisecond.
            if self.instance.live.release_all(&self.info) {
                return;
            }
            syscall::sleep_ns(DRAIN_NS);
        }
        self.instance.count(Counter::RuntimeRefusals);
    }

    /// One look at everything. Answers the number of requests answered.
    fn round(&mut self) -> (NextStep, u32) {
        // While the process ends, only questions matter.
        if self.instance.service.phase.load(Ordering::Acquire) == phase::WORK
            && self.look_at_lease() == NextStep::Detach
        {
            return (NextStep::Detach, 0);
        }
        if self.instance.is_listening() {
            self.instance.tell_untold();
            self.instance.keep_live_set(self.info);
            if self.instance.is_ring_filling() {
                ring();
            } else {
                self.instance.service.called.store(0, Ordering::Relaxed);
            }
        }
        self.answer_requests()
    }

    fn look_at_lease(&mut self) -> NextStep {
        let (listener, heartbeat, period_ns) = self.instance.region().lease_words();
        let verdict = self.lease.observe(listener, heartbeat, period_ns, syscall::now_ns());
        if verdict == LeaseState::Replaced {
            self.instance.is_taken_over();
        }
        match verdict {
            LeaseState::Listening
                if self.instance.is_listening() && !self.wants_another_session() => {}
            // Who comes now, or another one, knows nothing of what the last one was told.
            LeaseState::Listening | LeaseState::Replaced => {
                if self.instance.is_listening() {
                    self.quiet();
                }
                let listener = self.lease.listener();
                if listener != 0 {
                    self.instance.set_subscriptions(load::subscriptions(listener));
                }
                self.begin();
            }
            LeaseState::Quiet if self.instance.is_listening() => {
                self.instance.count(Counter::LeasesLost);
                self.quiet();
            }
            LeaseState::Quiet => {}
            LeaseState::Abandoned => return NextStep::Detach,
        }
        self.match_session();
        NextStep::Work
    }

    /// True when whoever listens subscribes to something else than the session is for: the library
    /// was loaded for nobody in particular.
    fn wants_another_session(&self) -> bool {
        let listener = self.lease.listener();
        listener != 0 && self.instance.subscriptions() != load::subscriptions(listener)
    }

    fn answer_requests(&mut self) -> (NextStep, u32) {
        let mut answered = 0;
        while answered < BATCH {
            if let Some((address, seen_ns)) = self.put_off.take() {
                self.answer(address, seen_ns);
                if self.put_off.is_some() {
                    break;
                }
            }
            let Some(request) = self.requests.take(self.instance.region()) else { break };
            answered = answered.wrapping_add(1);
            match request {
                Request::Name { address, seen_ns } => {
                    self.answer(address, seen_at(seen_ns, syscall::now_ns()));
                }
                Request::Detach => return (NextStep::Detach, answered),
                Request::Settings { handles, samples } => self.settings(handles, samples),
                Request::Heard => self.heard = true,
            }
        }
        if self.withheld && syscall::now_ns().saturating_sub(self.images_ns) > IMAGES_NS {
            self.withheld = false;
            self.note_images();
        }
        if self.instance.is_listening() {
            self.name_types();
        }
        (NextStep::Work, answered)
    }

    fn settings(&self, handles: u32, samples: u32) {
        if handles != 0 {
            self.instance.live.set_limit(handles.into());
        }
        if samples != 0 {
            self.instance.allocations.limit.store(samples, Ordering::Relaxed);
        }
    }

    /// Answers about an address that was on a stack at `seen_ns`.
    fn answer(&mut self, asked: u64, seen_ns: u64) {
        self.asked = true;
        let (instance, namer, named) = (self.instance, &self.namer, &mut self.named);
        // Sent within the gate, so that no answer follows the record that the code is gone. Sending
        // never waits.
        let address = asked as usize;
        let looked = instance.code.gate.look_up(address, || {
            let may_ask = !instance.code.gate.is_gone(address, seen_ns)
                && instance.code.lifetimes.may_ask(asked, seen_ns);
            let with_il = instance.subscriptions() & load::WITH_IL_MAPS != 0;
            let found = if may_ask { namer.method(address, with_il, named) } else { Err(NOT_NOW) };
            match found {
                Ok(()) => {
                    if named.lasting {
                        for range in named.ranges.iter().take(named.range_count) {
                            instance.code.lifetimes.lasts(range.start as u64);
                        }
                    }
                    instance.count(Counter::NamesFound);
                    send_method(instance, named, asked);
                }
                Err(hresult) => {
                    let withheld = hresult == NOT_NOW;
                    if withheld {
                        self.withheld = true;
                        self.withheld_ns = syscall::now_ns();
                    }
                    instance.count(if withheld {
                        Counter::NamesWithheld
                    } else {
                        Counter::NamesMissing
                    });
                    instance.send(RecordBody::NoMethod { asked, hresult });
                }
            }
        });
        if looked.is_none() {
            self.put_off = Some((asked, seen_ns));
        }
    }

    fn name_types(&self) {
        let instance = self.instance;
        instance.types.name_waiting(|type_id, still_there| {
            let named = instance.code.gate.look_up(NO_CODE, || {
                // An unload between the list and the gate has forgotten the types it took along.
                if !still_there() {
                    return true;
                }
                let (mut name, mut module) = (NameText::new(), NameText::new());
                let found = self.namer.class(type_id as usize, &mut name, &mut module);
                match found {
                    Some(module_id) => {
                        instance.count(Counter::TypeNames);
                        if let Some(named) = self.type_named {
                            named(type_id as usize, module_id, name.as_str(), module.as_str());
                        }
                    }
                    None => {
                        instance.count(Counter::RuntimeRefusals);
                        name.push('?');
                    }
                }
                let module_id = found.unwrap_or(0) as u64;
                instance.send(RecordBody::TypeName {
                    type_id,
                    module_id,
                    name: name.as_str(),
                    module: module.as_str(),
                })
            });
            named.unwrap_or(false)
        });
    }

    /// The process ends: a last chance for names, while its callback waits. It is over when the
    /// recorder has looked at all that was said, its own answers too: one of them may show that
    /// what was withheld before can be asked about.
    fn farewell(&mut self) {
        let timeout_ns = self.instance.farewell_ns();
        let until = syscall::now_ns().saturating_add(timeout_ns);
        // Before the bell: then it is read in the first round that follows.
        let mut marked = self.mark();
        ring();
        // A seccomp filter may deny the clock: then the number of looks ends it.
        for look in 0..timeout_ns / LAST_PAUSE_NS {
            if syscall::now_ns() >= until || recorder::is_due(look) && !self.instance.may_be_heard()
            {
                break;
            }
            if self.instance.service.phase.load(Ordering::Acquire) != phase::CLOSING {
                return;
            }
            self.round();
            if marked && self.heard && self.put_off.is_none() {
                if !self.asked {
                    break;
                }
                marked = false;
            }
            if !marked {
                marked = self.mark();
            }
            syscall::sleep_ns(LAST_PAUSE_NS);
        }
        self.instance.set_listening(false);
        if self.instance.service.phase.swap(phase::DONE, Ordering::AcqRel) == phase::CLOSING {
            self.instance.send(RecordBody::Bye);
        }
    }

    /// Says something that means nothing but "say when you have come to this". False while the ring
    /// has no room.
    fn mark(&mut self) -> bool {
        (self.asked, self.heard) = (false, false);
        self.instance.send(RecordBody::ThreadName { os_tid: 0, name: "" })
    }

    /// Leaves the process. True when the runtime agreed: then this thread must end.
    fn detach(&mut self) -> bool {
        self.instance.region().set_state(InstanceState::Closing);
        self.quiet();
        // No thread was to be had: then here. This one has no more questions.
        self.instance.stop_session(self.info);
        if self.instance.set_mask(self.info, Mask::NONE).is_err() {
            self.instance.count(Counter::RuntimeRefusals);
        }
        // An allocation callback that was under way may have made a handle since, or be about to.
        for _ in 0..DRAIN_LOOKS {
            syscall::sleep_ns(DRAIN_NS);
            if !self.instance.live.is_anybody_watching() {
                break;
            }
        }
        self.release_handles();
        self.instance.send(RecordBody::Bye);
        if self.instance.is_guest() {
            // The runtime does not know of it, and the library stays with exact mode. It is called
            // no more once it is not alive.
            self.instance.on_detached();
            return true;
        }
        // The runtime unloads the library some 0.3 s later, once no callback is on a stack, and
        // tells us before; there this thread is joined (`profiler_detach_succeeded`).
        match self.info.request_detach(1) {
            Ok(()) => true,
            Err(_) => {
                self.instance.count(Counter::RuntimeRefusals);
                if self.instance.set_mask(self.info, Mask::OURS).is_err() {
                    self.instance.count(Counter::RuntimeRefusals);
                }
                // Unloads have gone unseen.
                self.instance.code.lifetimes.on_unload(syscall::now_ns());
                self.instance.code.gate.forget();
                self.instance.types.forget();
                self.instance.code.untold.store(1, Ordering::Release);
                self.instance.region().set_state(InstanceState::Ready);
                self.lease = Lease::new(syscall::now_ns());
                false
            }
        }
    }
}

fn send_method(instance: &Instance, named: &NamedMethod, asked: u64) {
    if named.name.was_cut() {
        instance.count(Counter::NamesCut);
    }
    let mut ranges = [0u8; 8 * 16];
    let words =
        named.ranges.iter().take(named.range_count).flat_map(|r| [r.start as u64, r.bytes as u64]);
    for (to, word) in ranges.chunks_exact_mut(8).zip(words) {
        for (to, from) in to.iter_mut().zip(word.to_le_bytes()) {
            *to = from;
        }
    }
    let used = ranges.get(..named.range_count.wrapping_mul(16)).unwrap_or(&[]);
    let il_map = named.il_map.0.get(..named.il_map_bytes).filter(|map| !map.is_empty());
    instance.send(RecordBody::Method {
        asked,
        module_id: named.module_id as u64,
        token: named.token,
        dynamic: named.dynamic,
        ranges: WordList::new(used),
        name: named.name.as_str(),
        module: named.module.as_str(),
        il_map: il_map.map(|map| IlMapList::new(named.base as u64, map)),
    });
}
