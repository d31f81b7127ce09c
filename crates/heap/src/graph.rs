//! A heap in little memory: four bytes an object, four a reference, four for where an object's
//! references begin, and one bit for each eight bytes of heap while references are still addresses.
//!
//! Addresses become 32 bits by numbering the pieces of 4 MiB that are met: 13 bits of piece and 19
//! of word in it, so 32 GiB of heap. An object's number is the order in which it came; which one is
//! at an address is counted from the bits, because the runtime walks upwards (a stretch of objects
//! that came in order of address is a run, and no two runs may overlap).

use foldhash::fast::RandomState;
use std::collections::HashMap;

/// Bytes of a piece, and of a word: objects begin at multiples of 8.
const PIECE_BYTES: u64 = 4 << 20;
const WORD_BYTES: u64 = 8;
const WORD_BITS: u32 = 19;
const WORDS: usize = 1 << WORD_BITS;
const MAX_PIECES: usize = 1 << (32 - WORD_BITS);
/// Bits between two counts.
const COUNTED_BITS: usize = 512;
/// A reference to nothing that was walked.
pub(crate) const NOWHERE: u32 = u32::MAX;
/// More sorts of objects, by type and size, are no heap of a real program.
const MAX_SHAPES: usize = 1 << 22;

/// Why there is no graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoGraph {
    /// It would take more memory than was allowed.
    #[error("references were not kept: they take more than {limit_mib} MiB (--memory)")]
    Memory {
        /// What was allowed.
        limit_mib: u64,
    },
    /// Too wide for 32 bits.
    #[error("references were not kept: the heap lies in more than 32 GiB of memory")]
    Wide,
    /// More references or sorts of objects than numbers.
    #[error("references were not kept: there are too many")]
    Many,
    /// Events were lost, so it is unknown which references belong to which object.
    #[error(
        "references were not kept: {lost} events of the walk are missing (a larger --buffer may \
         help)"
    )]
    Lost {
        /// How many at the least.
        lost: u64,
    },
    /// Addresses make no sense.
    #[error("references were not kept: the runtime's walk was out of order")]
    Disorder,
}

/// What objects of one sort have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Number of the type.
    pub type_index: u32,
    /// Size in words.
    pub words: u32,
}

impl Shape {
    /// Bytes of one such object.
    #[must_use]
    pub fn bytes(self) -> u64 {
        u64::from(self.words) * WORD_BYTES
    }
}

/// Objects and what they refer to.
#[derive(Debug, Default)]
pub struct Graph {
    shapes: Vec<Shape>,
    /// Shape of each object.
    objects: Vec<u32>,
    /// Where each object's references begin; one more at the end.
    first: Vec<u32>,
    /// Objects referred to, or [`NOWHERE`].
    references: Vec<u32>,
    /// (key, value) of dependent handles, in order of keys: the key keeps the value alive.
    dependents: Vec<(u32, u32)>,
}

impl Graph {
    /// Number of objects.
    #[must_use]
    pub fn len(&self) -> usize {
        self.objects.len()
    }

    /// True without objects.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.objects.is_empty()
    }

    /// Bytes it takes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        4 * (self.objects.len() + self.first.len() + self.references.len())
            + size_of::<Shape>() * self.shapes.len()
            + 8 * self.dependents.len()
    }

    /// Number of references.
    #[must_use]
    pub fn references(&self) -> usize {
        self.references.len() + self.dependents.len()
    }

    /// The shape of an object.
    #[must_use]
    pub fn shape(&self, object: u32) -> Shape {
        let shape =
            self.objects.get(object as usize).and_then(|&shape| self.shapes.get(shape as usize));
        shape.copied().unwrap_or(Shape { type_index: 0, words: 0 })
    }

    /// Objects that fields and elements of `object` refer to.
    pub fn direct(&self, object: u32) -> impl Iterator<Item = u32> {
        let object = object as usize;
        let (from, to) = (self.first.get(object).copied(), self.first.get(object + 1).copied());
        let range = from.unwrap_or(0) as usize..to.unwrap_or(0) as usize;
        let references = self.references.get(range).unwrap_or_default();
        references.iter().copied().filter(|&to| to != NOWHERE)
    }

    /// Values of the dependent handles whose key `object` is.
    pub(crate) fn dependents(&self, object: u32) -> impl Iterator<Item = u32> {
        let from = self.dependents.partition_point(|&(key, _)| key < object);
        let after = self.dependents.get(from..).unwrap_or_default();
        after.iter().take_while(move |&&(key, _)| key == object).map(|&(_, value)| value)
    }
}

/// A graph while it comes in.
#[derive(Debug)]
pub struct GraphBuilder {
    limit_bytes: usize,
    /// What is kept besides and counts as its own.
    beside_bytes: usize,
    pieces: Pieces,
    runs: Vec<AddressRun>,
    /// False when the next object begins a run.
    in_run: bool,
    shape_numbers: HashMap<Shape, u32, RandomState>,
    shapes: Vec<Shape>,
    objects: Vec<u32>,
    first: Vec<u32>,
    /// Addresses as 32 bits.
    references: Vec<u32>,
    expected_references: u64,
    dependents: Vec<(u32, u32)>,
}

/// Objects that came in order of their addresses, in one piece.
#[derive(Clone, Copy, Debug)]
struct AddressRun {
    /// The first one's address as 32 bits.
    start: u32,
    /// The last one's.
    last: u32,
    /// The first one's number.
    object: u32,
}

impl GraphBuilder {
    /// An empty one that may grow to `limit_bytes`.
    #[must_use]
    pub fn new(limit_bytes: usize) -> Self {
        Self {
            limit_bytes,
            beside_bytes: 0,
            pieces: Pieces::default(),
            runs: Vec::new(),
            in_run: false,
            shape_numbers: HashMap::default(),
            shapes: Vec::new(),
            objects: Vec::new(),
            first: vec![0],
            references: Vec::new(),
            expected_references: 0,
            dependents: Vec::new(),
        }
    }

    /// Bytes it takes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        4 * (self.objects.len() + self.first.len() + self.references.len())
            + size_of::<AddressRun>() * self.runs.len()
            + 8 * self.dependents.len()
            // The table of numbers has a key, a value and a control byte, and is half empty at
            // worst.
            + self.shapes.len() * (8 + 2 * 13)
            + self.pieces.bytes()
    }

    /// Adds an object, whose references come later.
    ///
    /// # Errors
    /// When there is no room for it.
    pub fn object(
        &mut self,
        address: u64,
        bytes: u64,
        type_index: u32,
        references: u64,
    ) -> Result<(), NoGraph> {
        let words = u32::try_from(bytes.div_ceil(WORD_BYTES)).map_err(|_| NoGraph::Wide)?;
        let shape = Shape { type_index, words };
        let next = u32::try_from(self.shapes.len()).map_err(|_| NoGraph::Many)?;
        let number = *self.shape_numbers.entry(shape).or_insert(next);
        if number == next {
            if self.shapes.len() >= MAX_SHAPES {
                return Err(NoGraph::Many);
            }
            self.shapes.push(shape);
        }
        let object = u32::try_from(self.objects.len()).map_err(|_| NoGraph::Many)?;
        self.expected_references = self.expected_references.saturating_add(references);
        let end = u32::try_from(self.expected_references).map_err(|_| NoGraph::Many)?;
        // NOWHERE is no number of an object, nor of a reference.
        if object == NOWHERE || end == NOWHERE {
            return Err(NoGraph::Many);
        }
        self.objects.push(number);
        self.first.push(end);
        let place = self.pieces.reference(address)?;
        let pieces = self.pieces.with_objects;
        if !self.pieces.mark(place) {
            // Two objects at one place cannot be. Nobody refers to the second.
            self.in_run = false;
            return Ok(());
        }
        let continued = self.runs.last_mut().filter(|run| {
            self.in_run && place > run.last && place >> WORD_BITS == run.last >> WORD_BITS
        });
        match continued {
            Some(run) => run.last = place,
            None => self.runs.push(AddressRun { start: place, last: place, object }),
        }
        self.in_run = true;
        // A piece is large, and its one object may be small.
        if self.pieces.with_objects != pieces { self.check_limit() } else { self.within_limit() }
    }

    /// Adds the next reference of the objects that came, in their order.
    ///
    /// # Errors
    /// When there is no room for it.
    pub fn reference(&mut self, address: u64) -> Result<(), NoGraph> {
        let place = self.pieces.reference(address)?;
        self.references.push(place);
        self.within_limit()
    }

    /// Adds a dependent handle.
    ///
    /// # Errors
    /// When there is no room for it.
    pub fn dependent(&mut self, key: u64, value: u64) -> Result<(), NoGraph> {
        let pair = (self.pieces.reference(key)?, self.pieces.reference(value)?);
        self.dependents.push(pair);
        self.within_limit()
    }

    /// So much is kept beside it.
    ///
    /// # Errors
    /// When there is no room for both.
    pub fn beside(&mut self, bytes: usize) -> Result<(), NoGraph> {
        self.beside_bytes = bytes;
        self.check_limit()
    }

    /// An address as 32 bits, to be looked up when the graph is finished.
    ///
    /// # Errors
    /// When the heap is too wide.
    pub fn place(&mut self, address: u64) -> Result<u32, NoGraph> {
        self.pieces.reference(address)
    }

    fn within_limit(&self) -> Result<(), NoGraph> {
        // Looked at now and then: adding up costs more than adding.
        let all = self.objects.len() + self.references.len() + self.dependents.len();
        if all.is_multiple_of(4096) { self.check_limit() } else { Ok(()) }
    }

    fn check_limit(&self) -> Result<(), NoGraph> {
        match self.bytes().saturating_add(self.beside_bytes) > self.limit_bytes {
            true => Err(NoGraph::Memory { limit_mib: self.limit_bytes as u64 >> 20 }),
            false => Ok(()),
        }
    }

    /// Makes the graph. `places` become objects, or [`NOWHERE`].
    ///
    /// # Errors
    /// When the walk was not whole.
    pub fn finish(mut self, places: &mut [u32]) -> Result<Graph, NoGraph> {
        if self.expected_references != self.references.len() as u64 {
            return Err(NoGraph::Lost { lost: 1 });
        }
        self.shape_numbers = HashMap::default();
        self.runs.sort_unstable_by_key(|run| run.start);
        if self.runs.windows(2).any(|two| two[0].last >= two[1].start) {
            return Err(NoGraph::Disorder);
        }
        self.pieces.count();
        let (pieces, runs) = (&self.pieces, &self.runs);
        let find = |place: u32| {
            let run = runs
                .partition_point(|run| run.start <= place)
                .checked_sub(1)
                .and_then(|at| runs.get(at));
            match run {
                Some(run) if place <= run.last && pieces.is_marked(place) => {
                    // Counts only grow in a piece, and a run lies in one.
                    run.object + (pieces.before(place) - pieces.before(run.start))
                }
                _ => NOWHERE,
            }
        };
        self.references.iter_mut().chain(places).for_each(|place| *place = find(*place));
        let mut dependents: Vec<(u32, u32)> =
            self.dependents.iter().map(|&(key, value)| (find(key), find(value))).collect();
        dependents.retain(|&(key, value)| key != NOWHERE && value != NOWHERE);
        dependents.sort_unstable();
        dependents.dedup();
        let Self { shapes, objects, first, references, .. } = self;
        Ok(Graph { shapes, objects, first, references, dependents })
    }
}

/// Where objects begin, by pieces of the address space.
#[derive(Debug, Default)]
struct Pieces {
    numbers: HashMap<u64, u32, RandomState>,
    pieces: Vec<Piece>,
    /// The one asked for last, and its number.
    last: Option<(u64, u32)>,
    with_objects: usize,
}

/// One piece; empty until an object is in it.
#[derive(Debug, Default)]
struct Piece {
    bits: Vec<u64>,
    /// Objects before each stretch of bits.
    counts: Vec<u32>,
}

impl Pieces {
    fn bytes(&self) -> usize {
        self.pieces.len() * (size_of::<Piece>() + 32)
            + self.with_objects * (WORDS / 8 + WORDS / COUNTED_BITS * 4)
    }

    /// An address as 32 bits.
    fn reference(&mut self, address: u64) -> Result<u32, NoGraph> {
        let (piece, word) = (address / PIECE_BYTES, address % PIECE_BYTES / WORD_BYTES);
        let number = match self.last {
            Some((last, number)) if last == piece => number,
            _ => {
                let next = u32::try_from(self.pieces.len()).map_err(|_| NoGraph::Wide)?;
                let number = *self.numbers.entry(piece).or_insert(next);
                if number == next {
                    // The last of all places is NOWHERE.
                    if self.pieces.len() >= MAX_PIECES - 1 {
                        return Err(NoGraph::Wide);
                    }
                    self.pieces.push(Piece::default());
                }
                self.last = Some((piece, number));
                number
            }
        };
        Ok(number << WORD_BITS | word as u32)
    }

    fn parts(place: u32) -> (usize, usize) {
        ((place >> WORD_BITS) as usize, place as usize % WORDS)
    }

    /// Marks the begin of an object; false if there was one.
    fn mark(&mut self, place: u32) -> bool {
        let (number, word) = Self::parts(place);
        let Some(piece) = self.pieces.get_mut(number) else { return false };
        if piece.bits.is_empty() {
            piece.bits = vec![0; WORDS / 64];
            self.with_objects += 1;
        }
        let Some(bits) = piece.bits.get_mut(word / 64) else { return false };
        let is_new = *bits & 1 << (word % 64) == 0;
        *bits |= 1 << (word % 64);
        is_new
    }

    fn is_marked(&self, place: u32) -> bool {
        let (number, word) = Self::parts(place);
        let bits = self.pieces.get(number).and_then(|piece| piece.bits.get(word / 64));
        bits.is_some_and(|bits| bits & 1 << (word % 64) != 0)
    }

    /// Counts, for [`before`](Self::before).
    fn count(&mut self) {
        for piece in &mut self.pieces {
            let mut count = 0;
            piece.counts = piece
                .bits
                .chunks(COUNTED_BITS / 64)
                .map(|stretch| {
                    let before = count;
                    count += stretch.iter().map(|bits| bits.count_ones()).sum::<u32>();
                    before
                })
                .collect();
        }
    }

    /// Objects of the piece before a place.
    fn before(&self, place: u32) -> u32 {
        let (number, word) = Self::parts(place);
        let Some(piece) = self.pieces.get(number) else { return 0 };
        let stretch = word / COUNTED_BITS;
        let from = stretch * (COUNTED_BITS / 64);
        let whole = piece.bits.get(from..word / 64).unwrap_or_default();
        let part = piece
            .bits
            .get(word / 64)
            .map_or(0, |bits| (bits & ((1 << (word % 64)) - 1)).count_ones());
        let counted = piece.counts.get(stretch).copied().unwrap_or(0);
        counted + whole.iter().map(|bits| bits.count_ones()).sum::<u32>() + part
    }
}

#[cfg(test)]
mod tests {
    use super::{GraphBuilder, NOWHERE, NoGraph, PIECE_BYTES};
    use proptest::{collection::vec, prelude::any, prop_assert_eq, proptest};
    use std::collections::BTreeMap;

    const LIMIT: usize = 1 << 30;

    #[test]
    fn references_find_objects_wherever_pieces_lie() {
        let mut builder = GraphBuilder::new(LIMIT);
        // A high piece first, then a low one, then the high one's rest.
        let addresses = [0x7f00_0000_0000, 0x7f00_0000_0018, 0x1000, 0x1020, 0x7f00_0000_0100];
        for address in addresses {
            builder.object(address, 24, 0, 1).unwrap();
        }
        for target in [0x1020, 0x7f00_0000_0100, 0x7f00_0000_0008, 0x7f00_0000_0018, 0x5000_0000] {
            builder.reference(target).unwrap();
        }
        builder.dependent(0x1000, 0x1020).unwrap();
        let mut places = [builder.place(0x1000).unwrap(), builder.place(0x1008).unwrap()];
        let graph = builder.finish(&mut places).unwrap();
        let direct: Vec<Vec<u32>> = (0..5).map(|object| graph.direct(object).collect()).collect();
        assert_eq!(direct, [vec![3], vec![4], vec![], vec![1], vec![]]);
        assert_eq!(graph.dependents(2).collect::<Vec<_>>(), [3]);
        assert_eq!(graph.dependents(3).count(), 0);
        assert_eq!(places, [2, NOWHERE]);
        assert_eq!(graph.shape(4).bytes(), 24);
    }

    #[test]
    fn what_cannot_be_kept_is_refused_with_the_reason() {
        let mut wide = GraphBuilder::new(LIMIT);
        let refused = (0..1 << 14).find_map(|piece| wide.reference(piece * PIECE_BYTES).err());
        assert_eq!(refused, Some(NoGraph::Wide));
        let mut small = GraphBuilder::new(1 << 20);
        let refused = (0..1_000_000).find_map(|at| small.object(at * 24, 24, 0, 0).err());
        assert_eq!(refused, Some(NoGraph::Memory { limit_mib: 1 }));
        let mut short = GraphBuilder::new(LIMIT);
        short.object(64, 24, 0, 2).unwrap();
        short.reference(64).unwrap();
        assert_eq!(short.finish(&mut []).unwrap_err(), NoGraph::Lost { lost: 1 });
        let mut crossed = GraphBuilder::new(LIMIT);
        for address in [64, 640, 128, 1280] {
            crossed.object(address, 24, 0, 0).unwrap();
        }
        assert_eq!(crossed.finish(&mut []).unwrap_err(), NoGraph::Disorder);
    }

    proptest! {
        #[test]
        fn every_object_is_found_at_its_address(
            pieces in vec((any::<u16>(), vec(1u64..40, 1..200)), 1..6),
        ) {
            let mut builder = GraphBuilder::new(LIMIT);
            let mut expected = BTreeMap::new();
            for (piece, steps) in pieces {
                let mut address = u64::from(piece) * PIECE_BYTES;
                if expected.range(address..address + PIECE_BYTES).next().is_some() {
                    continue;
                }
                for step in steps {
                    address += step * 8;
                    let number = u32::try_from(expected.len()).unwrap();
                    expected.insert(address, number);
                    builder.object(address, 24, 0, 0).unwrap();
                }
            }
            let mut places: Vec<u32> =
                expected.keys().map(|&address| builder.place(address).unwrap()).collect();
            builder.finish(&mut places).unwrap();
            prop_assert_eq!(places, expected.values().copied().collect::<Vec<_>>());
        }
    }
}
