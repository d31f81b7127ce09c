//! Profiles of other tools: made from a seed, each of one kind of what is odd in the wild, as bytes
//! of the wire format. A message type could not say most of it: labels without key, strings that
//! are not UTF-8, ids that stand twice.

use std::io::Write as _;

use flate2::{Compression, write::GzEncoder, write::ZlibEncoder};

/// What is odd about a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Labels: several of a name, with text and number, without key, empty, with units.
    Labels,
    /// Ids: mappings that are not there, functions, locations; twice; zero.
    Tables,
    /// Sample types: a default that is not there, types twice, none, another number of values.
    Types,
    /// Strings that are not UTF-8, and indices outside the table.
    Bytes,
    /// Values: below zero, huge, of a difference to a base, in odd units, of no duration.
    Values,
    /// Functions without names: an address, a mapping, nothing; several files, inlined calls.
    Unnamed,
    /// `drop_frames` and `keep_frames`.
    Drop,
    /// Around the message: members of gzip, what is cut, what follows, several in one file.
    Container,
    /// Names that other formats would read as something else.
    Names,
    /// Deep and wide stacks.
    Shapes,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 10] = [
        Self::Labels,
        Self::Tables,
        Self::Types,
        Self::Bytes,
        Self::Values,
        Self::Unnamed,
        Self::Drop,
        Self::Container,
        Self::Names,
        Self::Shapes,
    ];
}

/// Numbers from a seed (splitmix64).
#[derive(Debug)]
pub struct Random(u64);

impl Random {
    /// The same numbers for the same seed.
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Below `limit`, which is not 0.
    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    /// One time in so many.
    fn one_in(&mut self, many: u64) -> bool {
        self.below(many) == 0
    }

    fn pick<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        let at = usize::try_from(self.below(of.len() as u64)).unwrap_or(0);
        &of[at]
    }
}

/// A message while it is written.
#[derive(Debug, Default)]
struct Message(Vec<u8>);

impl Message {
    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push((value & 0x7f) as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    fn number(&mut self, field: u64, value: u64) -> &mut Self {
        self.varint(field << 3);
        self.varint(value);
        self
    }

    fn bytes(&mut self, field: u64, value: &[u8]) -> &mut Self {
        self.varint(field << 3 | 2);
        self.varint(value.len() as u64);
        self.0.extend_from_slice(value);
        self
    }

    fn packed(&mut self, field: u64, values: &[u64]) -> &mut Self {
        let mut packed = Self::default();
        values.iter().for_each(|&value| packed.varint(value));
        self.bytes(field, &packed.0)
    }
}

/// A label as it stands in the file: key, text, number, unit; 0 is left out.
type Label = [u64; 4];

#[derive(Clone, Debug, Default)]
struct Sample {
    locations: Vec<u64>,
    values: Vec<i64>,
    labels: Vec<Label>,
}

/// A profile before it is bytes.
#[derive(Debug, Default)]
struct Draft {
    strings: Vec<Vec<u8>>,
    types: Vec<(u64, u64)>,
    samples: Vec<Sample>,
    /// id, file name.
    mappings: Vec<(u64, u64)>,
    /// id, mapping, address, functions.
    locations: Vec<(u64, u64, u64, Vec<u64>)>,
    /// id, name, system name.
    functions: Vec<(u64, u64, u64)>,
    /// Other fields and their numbers.
    fields: Vec<(u64, u64)>,
}

impl Draft {
    fn text(&mut self, text: impl AsRef<[u8]>) -> u64 {
        let text = text.as_ref();
        let known = self.strings.iter().position(|known| known == text);
        let at = known.unwrap_or_else(|| {
            self.strings.push(text.to_vec());
            self.strings.len() - 1
        });
        at as u64
    }

    /// Functions with these names, each with a location of its own; both get the numbers from 1 on.
    fn functions(&mut self, names: &[Vec<u8>]) {
        for name in names {
            let (id, name) = (self.functions.len() as u64 + 1, self.text(name));
            self.functions.push((id, name, 0));
            self.locations.push((id, 0, 0, vec![id]));
        }
    }

    /// Samples of these locations.
    fn samples(&mut self, random: &mut Random, count: u64, deepest: u64) {
        let locations = self.locations.len() as u64;
        for _ in 0..count {
            let depth = random.below(deepest) + 1;
            self.samples.push(Sample {
                locations: (0..depth).map(|_| random.below(locations) + 1).collect(),
                values: self.types.iter().map(|_| (random.below(1000) + 1) as i64).collect(),
                labels: Vec::new(),
            });
        }
    }

    fn encode(&self, random: &mut Random) -> Vec<u8> {
        let mut all = Message::default();
        let strings = |all: &mut Message| {
            self.strings.iter().for_each(|text| {
                all.bytes(6, text);
            })
        };
        // Tools write the table first or last.
        let first = random.one_in(2);
        if first {
            strings(&mut all);
        }
        for &(name, unit) in &self.types {
            all.bytes(1, &Message::default().number(1, name).number(2, unit).0);
        }
        for sample in &self.samples {
            let mut message = Message::default();
            let values: Vec<u64> =
                sample.values.iter().map(|value| value.cast_unsigned()).collect();
            if random.one_in(2) {
                message.packed(1, &sample.locations).packed(2, &values);
            } else {
                sample.locations.iter().for_each(|&id| {
                    message.number(1, id);
                });
                values.iter().for_each(|&value| {
                    message.number(2, value);
                });
            }
            for label in &sample.labels {
                let mut encoded = Message::default();
                for (field, &value) in (1..).zip(label).filter(|(_, value)| **value != 0) {
                    encoded.number(field, value);
                }
                message.bytes(3, &encoded.0);
            }
            all.bytes(2, &message.0);
        }
        for &(id, file) in &self.mappings {
            all.bytes(3, &Message::default().number(1, id).number(5, file).0);
        }
        for (id, mapping, address, lines) in &self.locations {
            let mut message = Message::default();
            message.number(1, *id).number(2, *mapping).number(3, *address);
            lines.iter().for_each(|&function| {
                message.bytes(4, &Message::default().number(1, function).0);
            });
            all.bytes(4, &message.0);
        }
        for &(id, name, system) in &self.functions {
            all.bytes(5, &Message::default().number(1, id).number(2, name).number(3, system).0);
        }
        if !first {
            strings(&mut all);
        }
        for &(field, value) in &self.fields {
            all.number(field, value);
        }
        all.0
    }
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes).and_then(|()| encoder.finish()).unwrap_or_default()
}

fn plain_names() -> Vec<Vec<u8>> {
    [
        "main",
        "main.work",
        "serve<T>(int)",
        "parse",
        "alloc",
        "memcpy",
        "Ns.Type.Method(System.String)",
    ]
    .iter()
    .map(|name| name.as_bytes().to_vec())
    .collect()
}

/// A file of this kind. One seed gives the same file everywhere.
pub fn file(kind: Kind, seed: u64) -> Vec<u8> {
    let random = &mut Random::new(seed.wrapping_mul(0x1000).wrapping_add(kind as u64));
    let mut draft = Draft { strings: vec![Vec::new()], ..Draft::default() };
    let (cpu, nanoseconds) = (draft.text("cpu"), draft.text("nanoseconds"));
    draft.types.push((cpu, nanoseconds));
    match kind {
        Kind::Names => return names(draft, random),
        Kind::Shapes => return shapes(draft, random),
        Kind::Unnamed => return unnamed(draft, random),
        _ => {}
    }
    if random.one_in(2) {
        let (samples, count) = (draft.text("samples"), draft.text("count"));
        draft.types.insert(0, (samples, count));
    }
    draft.functions(&plain_names());
    let count = random.below(12) + 1;
    draft.samples(random, count, 6);
    match kind {
        Kind::Labels => labels(&mut draft, random),
        Kind::Tables => tables(&mut draft, random),
        Kind::Types => types(&mut draft, random),
        Kind::Bytes => bytes(&mut draft, random),
        Kind::Values => values(&mut draft, random),
        Kind::Drop => drop_frames(&mut draft, random),
        Kind::Container => return container(&draft, random),
        Kind::Names | Kind::Shapes | Kind::Unnamed => {}
    }
    let bytes = draft.encode(random);
    if random.one_in(2) { gzip(&bytes) } else { bytes }
}

fn labels(draft: &mut Draft, random: &mut Random) {
    let keys = ["thread", "bytes", "k", "thread_name", "pid", "wait_kind", "pprof::base"]
        .map(|key| draft.text(key));
    let mut texts = ["a", "b", "idle", "main", "with blank"].map(|text| draft.text(text)).to_vec();
    // An empty text that is not the first of the table.
    draft.strings.push(Vec::new());
    texts.push(draft.strings.len() as u64 - 1);
    let units = [0, draft.text("bytes"), draft.text("widgets")];
    for sample in &mut draft.samples {
        for _ in 0..random.below(4) {
            let key = if random.one_in(8) { 0 } else { *random.pick(&keys) };
            let (text, number) = (*random.pick(&texts), random.below(5));
            sample.labels.push(match random.below(4) {
                0 => [key, text, 0, 0],
                1 => [key, 0, number, *random.pick(&units)],
                2 => [key, text, number, *random.pick(&units)],
                _ => [key, 0, 0, 0],
            });
        }
    }
}

fn tables(draft: &mut Draft, random: &mut Random) {
    let file = draft.text("/usr/lib/libwork.so");
    draft.mappings.push((1, file));
    let at = usize::try_from(random.below(draft.locations.len() as u64)).unwrap_or(0);
    match random.below(12) {
        0 => draft.locations[at].0 = 0,
        1 => draft.locations[at].0 = 1,
        2 => draft.functions[at].0 = 0,
        3 => draft.functions[at].0 = 1,
        4 => draft.locations[at].3 = vec![99],
        5 => draft.locations[at].3 = vec![1, 0],
        6 => draft.samples[0].locations.push(*random.pick(&[0, 99, u64::MAX])),
        7 => draft.mappings.push((*random.pick(&[0, 1, 2]), file)),
        // What is fine: numbers with gaps, huge ones, a mapping that is not there.
        8 => {
            let id = u64::MAX - 5;
            let old = std::mem::replace(&mut draft.locations[at].0, id);
            let places = draft.samples.iter_mut().flat_map(|sample| &mut sample.locations);
            places.filter(|place| **place == old).for_each(|place| *place = id);
        }
        9 => draft.locations.reverse(),
        _ => draft.locations[at].1 = *random.pick(&[9, u64::MAX, 2]),
    }
}

fn types(draft: &mut Draft, random: &mut Random) {
    let (space, bytes) = (draft.text("inuse_space"), draft.text("bytes"));
    match random.below(8) {
        0 => draft.types.clear(),
        1 => {
            draft.types.clear();
            draft.samples.clear();
        }
        2 => draft.samples[0].values.push(7),
        3 => {
            draft.samples[0].values.pop();
        }
        4 => {
            // Twice, with or without another one.
            let again = *random.pick(&draft.types.clone());
            draft.types.push(again);
            draft.samples.iter_mut().for_each(|sample| sample.values.push(5));
        }
        5 => draft.samples.clear(),
        // A column that stands alone.
        6 => {
            draft.types = vec![(space, bytes)];
            draft.samples.iter_mut().for_each(|sample| sample.values.truncate(1));
        }
        _ => {
            draft.types.push((space, bytes));
            draft.samples.iter_mut().for_each(|sample| sample.values.push(5));
        }
    }
    let default = draft.text(*random.pick(&["", "cpu", "nosuch", "samples", "inuse_space"]));
    draft.fields.push((14, default));
}

fn bytes(draft: &mut Draft, random: &mut Random) {
    let wrong: [&[u8]; 5] = [b"caf\xe9", b"caf\xe8", b"\xff\xfe", b"a\xc3", b"\xe2\x82 cut"];
    for text in wrong {
        if random.one_in(2) {
            let at = usize::try_from(random.below(7)).unwrap_or(0);
            draft.functions[at].1 = draft.text(text);
        }
    }
    let (key, value) = (draft.text(b"k\xe9y"), draft.text(b"v\x80"));
    draft.samples[0].labels.push([key, value, 0, 0]);
    match random.below(12) {
        0 => draft.functions[1].1 = 9_999,
        1 => draft.samples[0].labels.push([9_999, value, 0, 0]),
        2 => draft.fields.push((14, u64::MAX)),
        3 => draft.strings[0] = b"first".to_vec(),
        _ => {}
    }
}

fn values(draft: &mut Draft, random: &mut Random) {
    let unit = draft.text(*random.pick(&[
        "nanoseconds",
        "bytes",
        "milliseconds",
        "count",
        "widgets",
        "",
        "seconds",
    ]));
    for each in &mut draft.types {
        each.1 = unit;
    }
    let signs = random.below(4);
    let base = [draft.text("pprof::base"), draft.text("true"), 0, 0];
    for sample in &mut draft.samples {
        for value in &mut sample.values {
            let below_zero = signs == 1 || signs == 2 && random.one_in(2);
            if below_zero {
                *value = -*value;
            }
            if random.one_in(9) {
                *value = 0;
            }
            if signs == 3 && random.one_in(4) {
                *value = 1 << (20 + random.below(25));
            }
        }
        if signs == 2 && sample.values.iter().any(|&value| value < 0) && random.one_in(2) {
            sample.labels.push(base);
        }
        if random.one_in(6) {
            sample.locations.clear();
        }
    }
    if random.one_in(2) {
        draft.fields.push((10, *random.pick(&[1, 1_000_000_000, u64::MAX, 1 << 62])));
        draft.fields.push((9, *random.pick(&[1, 1 << 60, u64::MAX])));
    }
}

fn unnamed(mut draft: Draft, random: &mut Random) -> Vec<u8> {
    for (id, file) in (1..).zip(["/usr/lib/libwork.so.1", "app", "[vdso]", ""]) {
        let file = draft.text(file);
        draft.mappings.push((id, file));
    }
    draft.functions(&plain_names());
    let system = draft.text("system_name_of_it");
    let functions = draft.functions.len() as u64;
    for (_, name, of_system) in &mut draft.functions {
        match random.below(4) {
            0 => *name = 0,
            1 => (*name, *of_system) = (0, system),
            _ => {}
        }
    }
    for id in functions + 1..functions + 12 {
        let address = if random.one_in(3) { 0 } else { 0x1000 * id };
        // None, or several that were inlined into each other.
        let lines = (0..random.below(4)).map(|_| random.below(functions) + 1).collect();
        draft.locations.push((id, random.below(5), address, lines));
    }
    draft.samples(random, 10, 8);
    draft.encode(random)
}

fn drop_frames(draft: &mut Draft, random: &mut Random) {
    let drops = [
        "alloc|memcpy",
        "mem.*",
        "main.*",
        ".*",
        "serve<T>",
        "(",
        "Ns\\..*",
        "",
        "[[:alpha:]]+",
        "parse|main",
    ];
    let keeps = ["", "memcpy", "main", "(", ".*work"];
    let (drop, keep) = (draft.text(*random.pick(&drops)), draft.text(*random.pick(&keeps)));
    draft.fields.extend([(7, drop), (8, keep)]);
    // Inlined calls, of which some are to be dropped.
    for location in &mut draft.locations {
        if random.one_in(3) {
            location.3 = (0..random.below(3) + 2).map(|_| random.below(7) + 1).collect();
        }
    }
}

fn container(draft: &Draft, random: &mut Random) -> Vec<u8> {
    let plain = draft.encode(random);
    let packed = gzip(&plain);
    let cut = |bytes: &[u8], random: &mut Random| {
        let end = usize::try_from(random.below(bytes.len() as u64)).unwrap_or(0);
        bytes[..end].to_vec()
    };
    match random.below(12) {
        0 => plain,
        1 => packed,
        // Members, one after the other, are one file; a member may be empty.
        2 => [gzip(&plain[..plain.len() / 2]), gzip(&plain[plain.len() / 2..])].concat(),
        3 => [gzip(b""), packed, gzip(b"")].concat(),
        4 => [&packed[..], b"garbage"].concat(),
        5 => [&packed[..], &[0; 16]].concat(),
        6 => cut(&packed, random),
        7 => gzip(&cut(&plain, random)),
        8 => {
            let mut encoder = ZlibEncoder::new(Vec::new(), Compression::fast());
            encoder.write_all(&plain).and_then(|()| encoder.finish()).unwrap_or_default()
        }
        9 => [packed.clone(), packed].concat(),
        10 => {
            let timed =
                [&plain[..], &Message::default().number(9, 1_700_000_000_000_000_000).0].concat();
            gzip(&timed.repeat(2))
        }
        _ => {
            // Unknown fields of each type; among them one that no reader knows.
            let mut more = Message::default();
            more.number(99, 5).bytes(98, b"text").number(*random.pick(&[0, 97]), 1);
            more.varint(96 << 3 | random.pick(&[1, 5]));
            more.0.extend([0; 8]);
            gzip(&[&plain[..], &more.0].concat())
        }
    }
}

fn names(mut draft: Draft, random: &mut Random) -> Vec<u8> {
    let long = "Generic<".repeat(150);
    let hostile = [
        "do work; now (x) 42",
        "do work: now (x) 42",
        "do work\\u{3b} now (x) 42",
        "a b 7",
        "a b\\u{20}7",
        " ",
        "  two",
        "# comment",
        "<script>alert(1)</script>",
        "\x1b[31mred\x1b[0m",
        "back\\slash",
        "\u{202e}reversed",
        "tab\there",
        "größe 3",
        "1",
        "-1",
        "x -1",
        "x 1.5",
        "[no stack]",
        "f(int) [clone .cold]",
        ";",
        ";;",
        "a\u{a0}b 9",
        "\u{feff}bom",
        "'quoted' \"twice\" & more",
        &long,
    ];
    let mut names: Vec<Vec<u8>> = hostile.iter().map(|name| name.as_bytes().to_vec()).collect();
    for _ in 0..6 {
        let length = random.below(8) + 1;
        let letters = [' ', ';', '7', 'a', '\\', '{', '}', 'u', '#', '.', '-'];
        // A name of blanks alone is one that pprof's lines do not tell from none.
        let name: String = (0..length).map(|_| *random.pick(&letters)).collect();
        names.push(format!("{name}z").into_bytes());
    }
    draft.functions(&names);
    draft.samples(random, 40, 5);
    draft.samples.push(Sample { values: vec![3], ..Sample::default() });
    gzip(&draft.encode(random))
}

fn shapes(mut draft: Draft, random: &mut Random) -> Vec<u8> {
    let width = random.below(400) + 2;
    let names: Vec<Vec<u8>> = (0..width).map(|number| format!("f{number}").into_bytes()).collect();
    draft.functions(&names);
    let deepest = *random.pick(&[2, 50, 3_000]);
    draft.samples(random, 30, deepest);
    gzip(&draft.encode(random))
}
