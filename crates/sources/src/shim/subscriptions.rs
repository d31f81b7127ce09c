//! What a recorder subscribes to at the shims, and what a shim is told of that when it is
//! loaded.

use perfusion_host::locked_files;
use perfusion_model::feature::{ExcludedFeatures, Feature};
use profiler_protocol::load::{self, OWNER_VARIABLE};
use rustix::io::Errno;
use std::ffi::OsString;

/// What a recorder subscribes to, beside what it always is. Runtimes are not asked for the
/// rest, and a program in which that happens often pays nothing for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Subscriptions {
    /// Exceptions.
    pub exceptions: bool,
    /// What these say, which may be anything.
    pub exception_messages: bool,
    /// Waits for locks.
    pub contention: bool,
    /// How many workers the thread pool has, and why.
    pub thread_pool: bool,
    /// Allocations.
    pub allocations: bool,
    /// Of those, the objects that live on.
    pub live_objects: bool,
    /// Which IL the code of methods comes from: their source lines need it.
    pub il_maps: bool,
    /// An event session of ours before the first object, for which programs that are started wait.
    pub start_session: bool,
}

impl Default for Subscriptions {
    fn default() -> Self {
        Self {
            exceptions: true,
            exception_messages: false,
            contention: true,
            thread_pool: false,
            allocations: true,
            live_objects: true,
            il_maps: false,
            start_session: false,
        }
    }
}

/// The columns that only the library fills, as comments name them.
pub const COLUMNS: &str =
    "alloc_objects, alloc_space, inuse_objects, inuse_space, exceptions, contentions, delay";
/// In a comment behind columns of a profile in which there is nothing because nothing was recorded;
/// why not comes then.
pub const NOT_RECORDED: &str = ": not recorded";
/// The same where there is less than there should be.
pub const NOT_ALL_RECORDED: &str = ": not of ";
/// Ends such a comment where nothing was asked for.
pub const AS_ASKED: &str = ": not recorded, as asked";

impl Subscriptions {
    /// For a profile's comments: the columns that are empty.
    pub fn comments(self) -> impl Iterator<Item = String> {
        let columns = [
            (self.exceptions, "exceptions"),
            (self.contention, "contentions, delay"),
            (self.allocations, "alloc_objects, alloc_space"),
            (self.allocations && self.live_objects, "inuse_objects, inuse_space"),
        ];
        columns.into_iter().filter(|(is_on, _)| !is_on).map(|(_, of)| format!("{of}{AS_ASKED}"))
    }

    /// This, but for what rules leave out.
    #[must_use]
    pub fn but_for(self, left_out: ExcludedFeatures) -> Self {
        Self {
            exceptions: self.exceptions && !left_out.has(Feature::Exceptions),
            contention: self.contention && !left_out.has(Feature::Contention),
            allocations: self.allocations && !left_out.has(Feature::Allocations),
            live_objects: self.live_objects && !left_out.has(Feature::LiveObjects),
            ..self
        }
    }

    fn bits(self) -> u64 {
        let bit = |set, bit| if set { bit } else { 0 };
        bit(!self.exceptions, load::WITHOUT_EXCEPTIONS)
            | bit(!self.contention, load::WITHOUT_CONTENTION)
            | bit(self.exception_messages, load::WITH_EXCEPTION_MESSAGES)
            | bit(self.thread_pool, load::WITH_THREAD_POOL)
            | bit(!self.allocations, load::WITHOUT_ALLOCATIONS)
            | bit(!self.live_objects, load::WITHOUT_LIVE_OBJECTS)
            | bit(self.start_session, load::WITH_START_SESSION)
            | bit(self.il_maps, load::WITH_IL_MAPS)
    }
}

/// What a shim is told when it is loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShimSettings {
    /// The number of the recorder its region is made for (`profiler_protocol::load::number`); see
    /// `registry`.
    pub owner: u64,
    /// True to attach to a process that has too little memory left for the shim.
    pub force: bool,
}

impl ShimSettings {
    /// A new recorder's.
    ///
    /// # Errors
    /// When the system has no random number.
    pub fn new(subscriptions: Subscriptions) -> Result<Self, Errno> {
        Ok(Self {
            owner: load::number(locked_files::random()?, subscriptions.bits()),
            force: false,
        })
    }

    /// The same recorder's, with other subscriptions.
    #[must_use]
    pub fn subscribing(self, subscriptions: Subscriptions) -> Self {
        Self { owner: load::number(self.owner, subscriptions.bits()), ..self }
    }

    /// The same, for processes that have too little memory left, too.
    #[must_use]
    pub fn forced(self, force: bool) -> Self {
        Self { force, ..self }
    }

    /// As environment variables.
    #[must_use]
    pub fn environment(self) -> [(OsString, OsString); 1] {
        [(OWNER_VARIABLE.into(), format!("{:016x}", self.owner).into())]
    }
}
