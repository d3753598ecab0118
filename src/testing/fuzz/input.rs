//! Bytes as a list of choices, as a fuzzer makes them. It must know nothing of what is chosen.

/// The bytes that no choice was read from yet. When they are used up, every choice is the first, and every number 0.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    /// All choices are still to be read.
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// Whether the bytes are used up.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// One byte.
    pub(crate) fn u8(&mut self) -> u8 {
        let [byte] = self.array();
        byte
    }

    /// Eight bytes, little-endian.
    pub(crate) fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }

    /// A number below `bound`, from as few bytes as can tell all of them; 0 when there is only that one, or none.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        let number = match bound {
            0 | 1 => return 0,
            2..=0x100 => self.u8().into(),
            0x101..=0x1_0000 => u16::from_le_bytes(self.array()).into(),
            0x1_0001..=0x1_0000_0000 => u32::from_le_bytes(self.array()).into(),
            _ => self.u64(),
        };
        number % bound
    }

    /// A place in a list of `len`; 0 when the list is empty.
    pub(crate) fn index(&mut self, len: usize) -> usize {
        usize::try_from(self.below(len as u64)).unwrap_or(0)
    }

    fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut array = [0; N];
        let read = self.0.len().min(N);
        let (bytes, rest) = self.0.split_at(read);
        for (into, byte) in array.iter_mut().zip(bytes) {
            *into = *byte;
        }
        self.0 = rest;
        array
    }
}
