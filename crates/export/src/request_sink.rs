//! The sink of a receiver that takes requests of limited length. What receivers differ by is how a
//! request is made of a window.

use super::deliver::{DeliveryCounters, SpoolBacklog};
use super::parts::{RequestSpooler, SinkSignals};
use super::{FinishedProfile, Sink, SinkError};
use std::path::Path;
use std::time::Instant;

/// Makes requests of windows for one kind of receiver.
pub trait RequestMaker: Send {
    /// Makes requests of a window's samples from `first` on and puts them into the spool.
    ///
    /// # Errors
    /// When the profile cannot be read, or something of it is lost.
    fn make(
        &mut self,
        outgoing: &mut RequestSpooler,
        finished: &FinishedProfile,
        first: u64,
    ) -> Result<(), SinkError>;

    /// The counter that only this kind of receiver has.
    fn counter(&self, delivered: &DeliveryCounters) -> (&'static str, u64);
}

/// The sink.
pub struct RequestSink<M> {
    name: String,
    outgoing: RequestSpooler,
    maker: M,
}

impl<M: RequestMaker> RequestSink<M> {
    /// Messages call it `name`.
    pub(crate) fn new(name: String, outgoing: RequestSpooler, maker: M) -> Self {
        Self { name, outgoing, maker }
    }
}

impl<M: RequestMaker> Sink for RequestSink<M> {
    fn name(&self) -> &str {
        &self.name
    }

    fn place(&self) -> &Path {
        self.outgoing.delivery.directory()
    }

    fn within(&mut self, memory: u64) {
        self.outgoing.within(memory);
    }

    fn hurries(&mut self, hurry: SinkSignals) {
        self.outgoing.hurry = hurry;
    }

    fn put(&mut self, finished: &FinishedProfile) -> Result<(), SinkError> {
        self.outgoing.begin();
        self.maker.make(&mut self.outgoing, finished, 0)
    }

    fn window_over(&mut self) {
        let Self { outgoing, maker, .. } = self;
        outgoing.take_up(|outgoing, finished, first| maker.make(outgoing, finished, first));
    }

    fn is_short_of_memory(&self) -> bool {
        self.outgoing.is_short_of_memory()
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        let (mut counters, delivered) = self.outgoing.counters();
        counters.push(self.maker.counter(&delivered));
        counters
    }

    fn backlog(&self) -> Option<SpoolBacklog> {
        Some(self.outgoing.delivery.backlog())
    }

    fn close(&mut self, deadline: Instant) {
        self.outgoing.delivery.close(deadline);
    }
}
