//! The one list of what the shim counts: index in the header, name, help. It only grows, and never
//! changes order: a shim may be older than the daemon that reads it.

macro_rules! counters {
    ($($(#[doc = $help:literal])+ $id:ident = $index:literal, $name:literal;)+) => {
        /// A counter of the shim; the number is its place among the header's counter words.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u8)]
        pub enum Counter { $($(#[doc = $help])+ $id = $index,)+ }

        /// All counters: id, metric name, help.
        pub const ALL: &[(Counter, &str, &str)] =
            &[$((Counter::$id, $name, concat!($($help),+)),)+];
    };
}

counters! {
    /// Records written to the ring.
    RecordsWritten = 0, "shim_records_written";
    /// Records dropped because the ring was full.
    RecordsDroppedFull = 1, "shim_records_dropped_full";
    /// Records given up half way (their space is skipped).
    RecordsAbandoned = 2, "shim_records_abandoned";
    /// Allocation samples delivered by the runtime, large objects among them, repeats not counted.
    AllocationSamples = 3, "shim_allocation_samples";
    /// Allocation samples dropped because the ring was full.
    AllocationsDroppedFull = 4, "shim_allocations_dropped_full";
    /// Allocation events dropped because another EventPipe session had delivered the same before.
    AllocationRepeats = 5, "shim_allocation_repeats";
    /// Events whose payload was not what the runtime's manifest says.
    EventsMalformed = 6, "shim_events_malformed";
    /// Events of other providers or other kinds.
    EventsForeign = 7, "shim_events_foreign";
    /// Allocation stacks that were cut because memory above the stack pointer could not be read.
    StacksCut = 8, "shim_stacks_cut";
    /// Sampled objects without a weak handle because all were in use before chance could choose:
    /// estimates of live objects lack them.
    HandlesFull = 9, "shim_handles_full";
    /// Sampled objects without a weak handle because the runtime refused it.
    HandlesRefused = 10, "shim_handles_refused";
    /// Weak handles made.
    HandlesCreated = 11, "shim_handles_created";
    /// Sampled objects found dead.
    ObjectsDead = 12, "shim_objects_dead";
    /// Reports of dead or surviving objects put off to the next collection because the ring was
    /// full, and watched objects that the runtime would not speak of.
    SurveysDeferred = 13, "shim_surveys_deferred";
    /// Collections at whose end objects could not be surveyed (their start was not seen, or handles
    /// were being freed).
    SurveysSkipped = 14, "shim_surveys_skipped";
    /// Requests taken from the request ring.
    RequestsTaken = 15, "shim_requests_taken";
    /// Requests that made no sense.
    RequestsMalformed = 16, "shim_requests_malformed";
    /// Addresses resolved to a method.
    NamesFound = 17, "shim_names_found";
    /// Addresses the runtime did not know.
    NamesMissing = 18, "shim_names_missing";
    /// Names cut because they were longer than the limit, and names of threads that had none of the
    /// room there is for those that do not run yet.
    NamesCut = 19, "shim_names_cut";
    /// Types whose name could not be asked later because the queue was full (they are queued again
    /// with their next allocation).
    TypesQueueFull = 20, "shim_types_queue_full";
    /// Type names sent.
    TypeNames = 21, "shim_type_names";
    /// Unloads that waited for a look-up in flight.
    UnloadsWaited = 22, "shim_unloads_waited";
    /// Unloads that went on although a look-up was in flight, because it took too long.
    UnloadsOverran = 23, "shim_unloads_overran";
    /// EventPipe sessions started.
    SessionsStarted = 24, "shim_sessions_started";
    /// EventPipe sessions the runtime refused.
    SessionsRefused = 25, "shim_sessions_refused";
    /// Times the daemon fell silent and the instance went quiet.
    LeasesLost = 26, "shim_leases_lost";
    /// Calls into the runtime that answered an error nothing else counts.
    RuntimeRefusals = 27, "shim_runtime_refusals";
    /// Starts of collections and pauses dropped because another EventPipe session had delivered the
    /// same before.
    GcRepeats = 28, "shim_gc_repeats";
    /// Records about code that was unloaded whose ranges the runtime no longer told.
    UnloadsUnknown = 29, "shim_unloads_unknown";
    /// Nanoseconds allocating threads spent on allocation samples, from the event's arrival to the
    /// record's commit.
    AllocationNs = 30, "shim_allocation_ns";
    /// Addresses not answered for now: something was unloaded since they were last on a stack for
    /// sure and they may lie in its code, or the type arguments of shared code cannot be told yet
    /// (asked again when seen again).
    NamesWithheld = 31, "shim_names_withheld";
    /// Sampled objects not watched, or not any more, because the set of watched ones was full:
    /// chosen by chance, what stays stands for them.
    ObjectsDownsampled = 32, "shim_objects_downsampled";
    /// Looks at the watched objects at the end of a collection.
    Surveys = 33, "shim_surveys";
    /// Nanoseconds of CPU time that those looks took.
    SurveyNs = 34, "shim_survey_ns";
    /// Times the set of watched objects was made smaller because a look took longer than its share
    /// of a pause.
    LiveSetShrunk = 35, "shim_live_set_shrunk";
    /// Exceptions thrown, repeats of the same event not counted.
    Exceptions = 36, "shim_exceptions";
    /// Of those, exceptions that others stand for: chance chose which are told of when many are
    /// thrown.
    ExceptionsDownsampled = 37, "shim_exceptions_downsampled";
    /// Exceptions that were to be told of and dropped because the ring was full.
    ExceptionsDroppedFull = 38, "shim_exceptions_dropped_full";
    /// Waits for locks that had an owner, over by now.
    Contentions = 39, "shim_contentions";
    /// Of those, waits that others stand for: chance chose which are told of when there are many,
    /// short ones first.
    ContentionsDownsampled = 40, "shim_contentions_downsampled";
    /// Waits for locks that were to be told of and dropped because the ring was full.
    ContentionsDroppedFull = 41, "shim_contentions_dropped_full";
    /// Waits for locks that are told of without the lock's owner, since their beginning is not
    /// known: it was before the attach, or so many threads waited that two shared a place.
    ContentionsUnmatched = 42, "shim_contentions_unmatched";
    /// Events of exceptions and locks dropped because another EventPipe session had delivered the
    /// same before.
    RuntimeRepeats = 43, "shim_runtime_repeats";
    /// Exceptions with a message so long that what stands behind it was not read: whether they were
    /// thrown again is not known.
    MessagesCut = 44, "shim_messages_cut";
    /// Allocation samples that others stand for: chance chose which are told of when many come.
    AllocationsDownsampled = 45, "shim_allocations_downsampled";
    /// Large objects among the allocation samples: the runtime tells of each of them by itself.
    LargeObjects = 46, "shim_large_objects";
    /// Allocation events of large objects, passed over: each such object is told of by itself.
    LargeObjectEvents = 47, "shim_large_object_events";
    /// Large objects among the samples that others stand for.
    LargeObjectsDownsampled = 48, "shim_large_objects_downsampled";
}

impl Counter {
    /// Offset of its word in the header, bytes.
    #[must_use]
    pub const fn offset(self) -> u64 {
        crate::layout::COUNTERS_AT.wrapping_add(8u64.wrapping_mul(self.index() as u64))
    }

    /// Its place in the list.
    #[must_use]
    pub const fn index(self) -> usize {
        self as usize
    }
}
