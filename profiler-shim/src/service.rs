//! The instance's own thread: watches the lease, answers requests, names types, has the EventPipe session started and ended, detaches.
//! A native thread: the runtime answers questions here that it refuses inside its callbacks (.NET 8 and 9).

use crate::com::info::Info;
use crate::instance::{Instance, phase};
use crate::method::{Line, Named, Namer};
use crate::syscall;
use core::sync::atomic::Ordering;
use profiler_protocol::counter::Counter;
use profiler_protocol::layout::State;
use profiler_protocol::lease::{Lease, Verdict};
use profiler_protocol::record::{Body, Words};
use profiler_protocol::request::{Request, RequestReader};

/// How often requests are looked for: while questions come, while somebody listens, while nobody does.
const BUSY_NS: u64 = 2_000_000;
const LISTENING_NS: u64 = 10_000_000;
const QUIET_NS: u64 = 100_000_000;
/// The end of a process waits at most this long for last questions (its callback a little longer).
const LAST_QUESTIONS_NS: u64 = 45_000_000;
/// Requests answered before the lease is looked at again.
const BATCH: u32 = 256;
/// How long callbacks that began before the session ended may take to leave.
const DRAIN_NS: u64 = 5_000_000;
const DRAIN_LOOKS: u32 = 200;

/// What the loop does next.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Next {
    Work,
    Detach,
}

struct Service<'a> {
    instance: &'a Instance,
    namer: Namer,
    info: Info,
    lease: Lease,
    requests: RequestReader,
    named: Named,
    /// An address that could not be answered because something was unloading.
    put_off: Option<u64>,
    no_more_questions: bool,
}

/// The thread's whole life. Returns when the process ends or the detach is under way.
pub fn run(instance: &Instance) {
    syscall::name_thread(c"perfusion-shim");
    let Some(info) = instance.info() else { return };
    let mut service = Service {
        instance,
        namer: Namer::new(info),
        info,
        lease: Lease::new(syscall::now_ns()),
        requests: RequestReader::new(),
        named: Named::new(),
        put_off: None,
        no_more_questions: false,
    };
    service.begin();
    instance.region().set_state(State::Ready);
    loop {
        match instance.phase.load(Ordering::Acquire) {
            phase::WORK => {}
            phase::CLOSING => return service.farewell(),
            _ => return,
        }
        let answered = match service.round() {
            (Next::Detach, _) => match service.detach() {
                true => return,
                false => 0,
            },
            (Next::Work, answered) => answered,
        };
        let pause = match (answered, instance.is_listening()) {
            (1.., _) => BUSY_NS,
            (0, true) => LISTENING_NS,
            (0, false) => QUIET_NS,
        };
        syscall::wait(&instance.phase, phase::WORK, pause);
    }
}

impl Service<'_> {
    /// Somebody listens (again): say who we are, start the session if it is not running.
    fn begin(&mut self) {
        let instance = self.instance;
        self.release_handles();
        instance.types.forget();
        instance.set_listening(true);
        instance.send(Body::Hello { runtime: instance.runtime.load(Ordering::Relaxed) });
        if instance.session.load(Ordering::Relaxed) == 0 {
            self.apart(|instance, info| instance.start_session(info));
        }
    }

    /// Nobody listens: nothing is produced any more.
    fn quiet(&self) {
        self.instance.set_listening(false);
        self.apart(|instance, info| instance.stop_session(info));
        self.release_handles();
    }

    /// Starts or ends a session on a passing thread. Both run managed code (the event source's own callback), and from then on the
    /// runtime takes the thread for one of its own: outside of callbacks it answers 0x80131363 to it for ever, and this thread
    /// has questions to ask (`PROFILER_TO_CLR_ENTRYPOINT_SYNC`, vm/proftoeeinterfaceimpl.inl).
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
    fn round(&mut self) -> (Next, u32) {
        let (listener, heartbeat, period_ns) = self.instance.region().lease_words();
        match self.lease.observe(listener, heartbeat, period_ns, syscall::now_ns()) {
            Verdict::Listening if !self.instance.is_listening() => self.begin(),
            Verdict::Listening => {}
            Verdict::Quiet if self.instance.is_listening() => {
                self.instance.count(Counter::LeasesLost);
                self.quiet();
            }
            Verdict::Quiet => {}
            Verdict::Abandoned => return (Next::Detach, 0),
        }
        let mut answered = 0;
        while answered < BATCH {
            if let Some(address) = self.put_off.take() {
                self.answer(address);
                if self.put_off.is_some() {
                    break;
                }
            }
            let Some(request) = self.requests.take(self.instance.region()) else { break };
            answered = answered.wrapping_add(1);
            match request {
                Request::Name(address) => self.answer(address),
                Request::Detach => return (Next::Detach, answered),
                Request::Settings { handles, stack_bytes } => self.settings(handles, stack_bytes),
                Request::NoMoreQuestions => self.no_more_questions = true,
            }
        }
        if self.instance.is_listening() {
            self.name_types();
        }
        (Next::Work, answered)
    }

    fn settings(&self, handles: u64, stack_bytes: u64) {
        if handles != 0 {
            self.instance.live.set_limit(handles);
        }
        if let (1.., Ok(bytes)) = (stack_bytes, u32::try_from(stack_bytes)) {
            self.instance.stack_bytes.store(bytes, Ordering::Relaxed);
        }
    }

    fn answer(&mut self, asked: u64) {
        let (namer, named) = (&self.namer, &mut self.named);
        let found = self.instance.gate.look_up(|| namer.method(asked as usize, named));
        match found {
            None => self.put_off = Some(asked),
            Some(Ok(())) => {
                self.instance.count(Counter::NamesFound);
                self.send_method(asked);
            }
            Some(Err(hresult)) => {
                self.instance.count(Counter::NamesMissing);
                self.instance.send(Body::NoMethod { asked, hresult });
            }
        }
    }

    fn send_method(&self, asked: u64) {
        let named = &self.named;
        if named.name.was_cut() {
            self.instance.count(Counter::NamesCut);
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
        self.instance.send(Body::Method {
            asked,
            module_id: named.module_id as u64,
            token: named.token,
            dynamic: named.dynamic,
            ranges: Words::new(used),
            name: named.name.as_str(),
            module: named.module.as_str(),
        });
    }

    fn name_types(&self) {
        self.instance.types.name_waiting(|type_id| {
            let (mut name, mut module) = (Line::new(), Line::new());
            let class = type_id as usize;
            match self.instance.gate.look_up(|| self.namer.class(class, &mut name, &mut module)) {
                None => false,
                Some(known) => {
                    if known {
                        self.instance.count(Counter::TypeNames);
                    } else {
                        self.instance.count(Counter::RuntimeRefusals);
                        name.push('?');
                    }
                    self.instance.send(Body::TypeName {
                        type_id,
                        name: name.as_str(),
                        module: module.as_str(),
                    })
                }
            }
        });
    }

    /// The process ends: a last chance for names, while its callback waits.
    fn farewell(&mut self) {
        let until = syscall::now_ns().saturating_add(LAST_QUESTIONS_NS);
        while !self.no_more_questions && syscall::now_ns() < until {
            if self.instance.phase.load(Ordering::Acquire) != phase::CLOSING {
                return;
            }
            self.round();
            syscall::sleep_ns(BUSY_NS / 4);
        }
        self.instance.set_listening(false);
        if self.instance.phase.swap(phase::DONE, Ordering::AcqRel) == phase::CLOSING {
            self.instance.send(Body::Bye);
        }
    }

    /// Leaves the process. True when the runtime agreed: then this thread must end.
    fn detach(&mut self) -> bool {
        self.instance.region().set_state(State::Closing);
        self.quiet();
        syscall::sleep_ns(DRAIN_NS);
        // An allocation callback that was under way may have made a handle since.
        self.release_handles();
        self.instance.send(Body::Bye);
        // The runtime unloads the library some 0.3 s later, once no callback is on a stack, and tells us before; there this thread is
        // joined (`profiler_detach_succeeded`).
        match self.info.request_detach(1) {
            Ok(()) => true,
            Err(_) => {
                self.instance.count(Counter::RuntimeRefusals);
                self.instance.region().set_state(State::Ready);
                self.lease = Lease::new(syscall::now_ns());
                false
            }
        }
    }
}
