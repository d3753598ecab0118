//! What happens to the files of a store, chosen by the bytes of an input.

use std::ops::Range;

use super::base::{Base, Files};
use super::input::Input;
use super::{mixed, repair};
use crate::format;
use crate::recovery::STORE_FILE;
use crate::{hint, segment};

/// As much is done to one directory at most.
const EDITS_MAX: usize = 16;

/// No file grows beyond this, and there are no more than so many.
const FILE_BYTES_MAX: usize = 1 << 20;
const FILES_MAX: usize = 24;

/// What files may be called beside segments: ours, others', and such that look like ours.
const NAMES: [&str; 9] = [
    STORE_FILE,
    "keyonce.store.tmp",
    "LOCK",
    "hint-00000001.keyonce",
    "hint-00000002.keyonce",
    "segment-0000000G.keyonce",
    "segment-1.keyonce",
    "lost+found",
    "notes.txt",
];

/// A field that is given another value: where it stands and how many bytes it has.
type Field = (usize, usize);

const STORE_FIELDS: [Field; 6] = [(8, 1), (16, 8), (32, 8), (48, 8), (56, 8), (64, 8)];

const HEADER_FIELDS: [Field; 16] = [
    (8, 4),
    (12, 1),
    (13, 1),
    (16, 8),
    (32, 8),
    (48, 8),
    (56, 8),
    (64, 8),
    (72, 8),
    (80, 8),
    (88, 8),
    (96, 8),
    (104, 8),
    (112, 8),
    (120, 8),
    (136, 8),
];

const HINT_FIELDS: [Field; 9] = [(8, 1), (12, 1), (32, 8), (40, 8), (48, 8), (56, 8), (80, 8), (88, 6), (94, 4)];

const RECORD_FIELDS: [Field; 17] = [
    (4, 3),
    (7, 1),
    (12, 4),
    (16, 8),
    (24, 6),
    (24, 8),
    (30, 6),
    (32, 8),
    (36, 6),
    (40, 8),
    (42, 6),
    (48, 4),
    (48, 8),
    (52, 4),
    (56, 2),
    (58, 2),
    (60, 8),
];

/// A directory that is being damaged.
pub(super) struct Damage<'a> {
    base: &'a Base,
    pub(super) files: Files,
    /// `Some`: what is written is noise, so that no input can be bent to pass a check. It depends on the whole input.
    noise: Option<u64>,
}

impl<'a> Damage<'a> {
    pub(super) fn new(base: &'a Base, noise: Option<u64>) -> Self {
        Self { base, files: base.moments.last().cloned().unwrap_or_default(), noise }
    }

    /// Does what the input says, to its end.
    pub(super) fn run(&mut self, input: &mut Input<'_>) {
        for _ in 0..EDITS_MAX {
            if input.is_empty() {
                return;
            }
            self.edit(input);
        }
    }

    fn edit(&mut self, input: &mut Input<'_>) {
        match input.u8() % 22 {
            0 => self.overwrite(input),
            1 => self.flip(input),
            2 => self.cut(input),
            3 => self.take_out(input),
            4 => self.zero(input),
            5 => drop(self.file(input).and_then(|name| self.files.remove(&name))),
            6 => self.duplicate(input),
            7 => self.swap(input),
            8 => self.rename(input),
            9 | 10 => self.splice(input),
            11 => self.grow(input),
            12 => self.add(input),
            13 => self.set_store_field(input),
            14 | 15 => self.set_header_field(input),
            16 | 17 => self.set_record_field(input),
            18 => self.put_record(input),
            19 | 20 => self.set_hint_field(input),
            _ => self.tear(input),
        }
    }

    /// The name of one of the files.
    fn file(&self, input: &mut Input<'_>) -> Option<String> {
        self.files.keys().nth(input.index(self.files.len())).cloned()
    }

    fn segment(&self, input: &mut Input<'_>) -> Option<String> {
        let segments: Vec<_> = self.files.keys().filter(|name| segment::file_index(name).is_some()).collect();
        segments.get(input.index(segments.len())).copied().cloned()
    }

    fn name(input: &mut Input<'_>) -> String {
        match input.u8() {
            choice @ 0..=0x7F => segment::file_name(u32::from(choice) % 12),
            choice @ 0x80..=0xEF => {
                NAMES.get(usize::from(choice) % NAMES.len()).copied().unwrap_or_default().to_owned()
            }
            choice => segment::file_name(u32::MAX - u32::from(choice % 4)),
        }
    }

    /// A place in a file: where headers are, in or near a record, or anywhere.
    fn place(&self, name: &str, input: &mut Input<'_>) -> usize {
        let Some(bytes) = self.files.get(name) else { return 0 };
        match input.u8() % 4 {
            0 => input.index(format::HEADER_BYTES),
            1 => format::BLOCK + input.index(format::HEADER_BYTES),
            2 => {
                let records = repair::records(bytes);
                let record = records.get(input.index(records.len())).cloned().unwrap_or_default();
                record.start + input.index((2 * record.len()).min(512))
            }
            _ => input.index(bytes.len()),
        }
    }

    /// A place and a length of up to 64 KiB, in whole blocks every other time.
    fn range(&self, name: &str, input: &mut Input<'_>) -> Range<usize> {
        let bytes = self.files.get(name).map_or(0, Vec::len);
        let (start, len) = match input.u8() % 4 {
            0 => (self.place(name, input), 1 + input.index(64)),
            1 => (self.place(name, input), 1 + input.index(1 << 16)),
            2 => (input.index(bytes / format::BLOCK + 1) * format::BLOCK, (1 + input.index(16)) * format::BLOCK),
            _ => (input.index(bytes / 512 + 1) * 512, (1 + input.index(8)) * 512),
        };
        start.min(bytes)..start.saturating_add(len).min(bytes)
    }

    fn content(&mut self, len: usize, input: &mut Input<'_>) -> Vec<u8> {
        match &mut self.noise {
            None => (0..len).map(|_| input.u8()).collect(),
            Some(noise) => std::iter::repeat_with(|| mixed(noise).to_le_bytes()).flatten().take(len).collect(),
        }
    }

    /// A value for a field: near what it is, at an end of what it may be, or any.
    fn value(&mut self, now: u64, input: &mut Input<'_>) -> u64 {
        if let Some(noise) = &mut self.noise {
            return mixed(noise);
        }
        let choice = input.u8();
        let small = u64::from(choice >> 3);
        match choice % 8 {
            0 => input.u64(),
            1 => now.wrapping_add(small),
            2 => now.wrapping_sub(small),
            3 => now.wrapping_add(8 * small),
            4 => u64::MAX - small,
            5 => u64::MAX - 0x1_0000 * small - 7,
            6 => 1 << (2 * small),
            _ => small,
        }
    }

    fn overwrite(&mut self, input: &mut Input<'_>) {
        let Some(name) = self.file(input) else { return };
        let at = self.place(&name, input);
        let len = 1 + input.index(16);
        let content = self.content(len, input);
        self.write(&name, at, &content);
    }

    fn write(&mut self, name: &str, at: usize, content: &[u8]) {
        let Some(bytes) = self.files.get_mut(name) else { return };
        for (into, byte) in bytes.iter_mut().skip(at).zip(content) {
            *into = *byte;
        }
    }

    fn flip(&mut self, input: &mut Input<'_>) {
        let Some(name) = self.file(input) else { return };
        let at = self.place(&name, input);
        let bit = input.u8() % 8;
        if let Some(byte) = self.files.get_mut(&name).and_then(|bytes| bytes.get_mut(at)) {
            *byte ^= 1 << bit;
        }
    }

    fn cut(&mut self, input: &mut Input<'_>) {
        let Some(name) = self.file(input) else { return };
        let at = self.place(&name, input);
        if let Some(bytes) = self.files.get_mut(&name) {
            bytes.truncate(at);
        }
    }

    fn take_out(&mut self, input: &mut Input<'_>) {
        let Some(name) = self.file(input) else { return };
        let range = self.range(&name, input);
        if let Some(bytes) = self.files.get_mut(&name) {
            bytes.drain(range);
        }
    }

    fn zero(&mut self, input: &mut Input<'_>) {
        let Some(name) = self.file(input) else { return };
        let range = self.range(&name, input);
        if let Some(bytes) = self.files.get_mut(&name).and_then(|bytes| bytes.get_mut(range)) {
            bytes.fill(0);
        }
    }

    fn duplicate(&mut self, input: &mut Input<'_>) {
        let Some(bytes) = self.file(input).and_then(|name| self.files.get(&name).cloned()) else { return };
        self.put(Self::name(input), bytes);
    }

    fn put(&mut self, name: String, mut bytes: Vec<u8>) {
        bytes.truncate(FILE_BYTES_MAX);
        if self.files.len() < FILES_MAX || self.files.contains_key(&name) {
            self.files.insert(name, bytes);
        }
    }

    fn swap(&mut self, input: &mut Input<'_>) {
        let (Some(one), Some(other)) = (self.file(input), self.file(input)) else { return };
        if let (Some(bytes), Some(others)) = (self.files.remove(&one), self.files.remove(&other)) {
            self.files.insert(one, others);
            self.files.insert(other, bytes);
        }
    }

    fn rename(&mut self, input: &mut Input<'_>) {
        let Some(bytes) = self.file(input).and_then(|name| self.files.remove(&name)) else { return };
        self.put(Self::name(input), bytes);
    }

    /// Puts what a file held at an earlier moment into a file of now: all of it, or a piece.
    fn splice(&mut self, input: &mut Input<'_>) {
        let base = self.base;
        let Some(then) = base.moments.get(input.index(base.moments.len())) else { return };
        let Some((name, bytes)) = then.iter().nth(input.index(then.len())) else { return };
        let choice = input.u8();
        if choice.is_multiple_of(4) {
            self.put(name.clone(), bytes.clone());
            return;
        }
        let name = if choice & 4 == 0 { Some(name.clone()) } else { self.file(input) };
        let Some(name) = name else { return };
        let range = self.range(&name, input);
        let piece = bytes.get(range.start..range.end.min(bytes.len())).unwrap_or_default();
        let at = if choice & 8 == 0 { range.start } else { self.place(&name, input) };
        self.write(&name, at, piece);
    }

    fn grow(&mut self, input: &mut Input<'_>) {
        let Some(name) = self.file(input) else { return };
        let more = 1 + input.index(1 << 17);
        if let Some(bytes) = self.files.get_mut(&name) {
            bytes.resize((bytes.len() + more).min(FILE_BYTES_MAX), 0);
        }
    }

    /// A file of bytes that may be anything, a few times over.
    fn add(&mut self, input: &mut Input<'_>) {
        let name = Self::name(input);
        let len = input.index(64);
        let times = 1 + input.index(256);
        let content = self.content(len, input);
        self.put(name, content.repeat(times));
    }

    fn set_store_field(&mut self, input: &mut Input<'_>) {
        let field = STORE_FIELDS.get(input.index(STORE_FIELDS.len())).copied().unwrap_or_default();
        self.set(STORE_FILE, 0, field, input);
    }

    /// Sets a field of a header, in both copies three times of four.
    fn set_header_field(&mut self, input: &mut Input<'_>) {
        let Some(name) = self.segment(input) else { return };
        let field = HEADER_FIELDS.get(input.index(HEADER_FIELDS.len())).copied().unwrap_or_default();
        let copies = input.u8() % 4;
        let first = if copies == 1 { format::BLOCK } else { 0 };
        self.set(&name, first, field, input);
        if copies > 1 {
            let (at, len) = field;
            let value = self.files.get(&name).and_then(|bytes| bytes.get(at..at + len)).unwrap_or_default().to_vec();
            self.write(&name, format::BLOCK + at, &value);
        }
    }

    /// Sets a field of a hint's head, or of one of its first entries.
    fn set_hint_field(&mut self, input: &mut Input<'_>) {
        let hints: Vec<_> = self.files.keys().filter(|name| hint::file_index(name).is_some()).collect();
        let Some(name) = hints.get(input.index(hints.len())).copied().cloned() else { return };
        let field = HINT_FIELDS.get(input.index(HINT_FIELDS.len())).copied().unwrap_or_default();
        let entry = if field.0 < format::HINT_HEAD_BYTES { 0 } else { input.index(16) };
        self.set(&name, entry * format::HINT_ENTRY_BYTES, field, input);
    }

    fn set_record_field(&mut self, input: &mut Input<'_>) {
        let Some(name) = self.segment(input) else { return };
        let Some(record) = self.record(&name, input) else { return };
        let field = RECORD_FIELDS.get(input.index(RECORD_FIELDS.len())).copied().unwrap_or_default();
        self.set(&name, record.start, field, input);
    }

    /// One of the records of a segment; the last ones are chosen as often as the first ones.
    fn record(&self, name: &str, input: &mut Input<'_>) -> Option<Range<usize>> {
        let records = repair::records(self.files.get(name)?);
        let choice = input.index(2 * records.len());
        let from_the_end = (2 * records.len()).checked_sub(1 + choice)?;
        records.get(choice.min(from_the_end)).cloned()
    }

    fn set(&mut self, name: &str, start: usize, (at, len): Field, input: &mut Input<'_>) {
        let at = start + at;
        let mut now = [0; 8];
        for (into, byte) in now.iter_mut().zip(self.files.get(name).into_iter().flatten().skip(at).take(len)) {
            *into = *byte;
        }
        let value = self.value(u64::from_le_bytes(now), input).to_le_bytes();
        self.write(name, at, value.get(..len).unwrap_or_default());
    }

    /// Writes the head of a record over or behind one, and the fields that follow it.
    fn put_record(&mut self, input: &mut Input<'_>) {
        let Some(name) = self.segment(input) else { return };
        let record = self.record(&name, input).unwrap_or(8192..8192);
        let at = if input.u8().is_multiple_of(2) { record.end } else { record.start };
        let kinds = [1, 2, 3, 4, 5, 16, 17, 18, 19];
        let kind = kinds.get(input.index(kinds.len())).copied().unwrap_or(0);
        let units = match (kind, input.u8()) {
            (16, _) => 7,
            (18, _) => 9,
            (_, units @ 0..=0xEF) => u64::from(units),
            (_, choice) => (1 << 24) - 1 - u64::from(choice % 16),
        };
        let [a, b, c, ..] = units.to_le_bytes();
        let behind = input.u64();
        let [d, e, f, g, ..] = behind.to_le_bytes();
        self.write(&name, at, &[1, 0, 0, 0, a, b, c, kind, 0, 0, 0, 0, d, e, f, g]);
        let content_bytes = input.index(64);
        let content = self.content(content_bytes, input);
        self.write(&name, at + format::HEAD_BYTES, &content);
    }

    /// Nothing from some record on was ever written.
    fn tear(&mut self, input: &mut Input<'_>) {
        let Some(name) = self.segment(input) else { return };
        let Some(record) = self.record(&name, input) else { return };
        let kept = input.index(record.len());
        if let Some(rest) = self.files.get_mut(&name).and_then(|bytes| bytes.get_mut(record.start + kept..)) {
            rest.fill(0);
        }
    }
}
