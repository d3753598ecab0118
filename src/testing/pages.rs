//! The bytes of a simulated file, in pages that its copies share: thousands of crash images differ in a few pages each.

use std::sync::Arc;

use super::disk::PAGE_BYTES;

type Page = [u8; PAGE_BYTES];

/// A page that was never written.
static BLANK: Page = [0; PAGE_BYTES];

/// Bytes of which a clone costs nothing but what is written to it afterwards.
#[derive(Clone, Debug, Default)]
pub(super) struct Pages {
    bytes: usize,
    /// Of each page its bytes, or `None` while it was never written. Behind the length there are zeros.
    pages: Arc<Vec<Option<Arc<Page>>>>,
}

impl Pages {
    pub(super) fn len(&self) -> usize {
        self.bytes
    }

    /// Cuts the bytes, or adds zeros.
    pub(super) fn resize(&mut self, bytes: usize) {
        if bytes < self.bytes {
            let last = bytes / PAGE_BYTES;
            let pages = Arc::make_mut(&mut self.pages);
            if let Some(Some(page)) = pages.get_mut(last) {
                Arc::make_mut(page).get_mut(bytes % PAGE_BYTES..).unwrap_or_default().fill(0);
            }
        }
        self.bytes = bytes;
        Arc::make_mut(&mut self.pages).resize(bytes.div_ceil(PAGE_BYTES), None);
    }

    /// Copies `bytes` to `offset`, as far as that reaches.
    pub(super) fn write(&mut self, offset: usize, bytes: &[u8]) {
        let bytes = bytes.get(..bytes.len().min(self.bytes.saturating_sub(offset))).unwrap_or_default();
        let pages = Arc::make_mut(&mut self.pages);
        for (at, within, part) in parts(offset, bytes.len()) {
            let Some(page) = pages.get_mut(at) else { return };
            let page = Arc::make_mut(page.get_or_insert_with(|| Arc::new(BLANK)));
            let into = page.get_mut(within..within + part.len()).expect("a part lies in one page");
            into.copy_from_slice(bytes.get(part).expect("a part of the bytes"));
        }
    }

    /// Reads at `offset`, as far as that reaches; what lies behind stays as it is.
    pub(super) fn read(&self, offset: usize, into: &mut [u8]) {
        let len = into.len().min(self.bytes.saturating_sub(offset));
        for (at, within, part) in parts(offset, len) {
            let from = self.page(at).get(within..within + part.len()).expect("a part lies in one page");
            into.get_mut(part).expect("a part of the bytes").copy_from_slice(from);
        }
    }

    /// The bytes at `offset`, if they lie in one page.
    pub(super) fn within_page(&self, offset: usize, len: usize) -> Option<&[u8]> {
        let within = offset % PAGE_BYTES;
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.bytes);
        if inside { self.page(offset / PAGE_BYTES).get(within..within + len) } else { None }
    }

    pub(super) fn to_vec(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.pages.len() * PAGE_BYTES);
        for page in self.pages.iter() {
            bytes.extend_from_slice(page.as_deref().unwrap_or(&BLANK));
        }
        bytes.truncate(self.bytes);
        bytes
    }

    fn page(&self, at: usize) -> &Page {
        self.pages.get(at).and_then(Option::as_deref).unwrap_or(&BLANK)
    }
}

impl From<&[u8]> for Pages {
    fn from(bytes: &[u8]) -> Self {
        let mut pages = Self::default();
        pages.resize(bytes.len());
        pages.write(0, bytes);
        pages
    }
}

/// Cuts `len` bytes at `offset` at every page: the page, where in it a part starts, which of the bytes it is.
fn parts(offset: usize, len: usize) -> impl Iterator<Item = (usize, usize, std::ops::Range<usize>)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        let within = (offset + done) % PAGE_BYTES;
        let part = done..len.min(done + PAGE_BYTES - within);
        let page = (offset + done) / PAGE_BYTES;
        done = part.end;
        (!part.is_empty()).then_some((page, within, part))
    })
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    #[test]
    fn pages_are_what_a_plain_buffer_would_be() {
        let (mut pages, mut plain) = (Pages::default(), Vec::new());
        let moves = [
            (10_000, 0, 4096),
            (10_000, 4095, 2),
            (10_000, 9_990, 50),
            (5_000, 4_000, 2_000),
            (12_288, 8_192, 4_096),
            (4_096, 0, 1),
            (9_000, 9_001, 10),
            (0, 0, 10),
            (100, 0, 100),
        ];
        for (fill, (len, offset, bytes)) in (1..).zip(moves) {
            let before = pages.clone();
            let bytes = vec![fill; bytes];
            pages.resize(len);
            pages.write(offset, &bytes);
            let unchanged = plain.clone();
            plain.resize(len, 0);
            for (at, byte) in bytes.iter().enumerate().take_while(|(at, _)| offset + at < len) {
                plain[offset + at] = *byte;
            }
            assert_eq!((pages.len(), pages.to_vec()), (len, plain.clone()));
            assert_eq!(before.to_vec(), unchanged, "a clone is changed by what is written to the other");
            assert_eq!(Pages::from(&*plain).to_vec(), plain);
            for (from, len) in [(0, 10), (4_090, 6), (4_090, 7), (4_096, 4_096), (8_000, 3_000), (9_999, 2)] {
                let mut read = vec![7; len];
                pages.read(from, &mut read);
                let there = plain.get(from..).unwrap_or_default();
                let there = &there[..len.min(there.len())];
                assert_eq!(read[..there.len()], *there);
                assert!(read[there.len()..].iter().all(|byte| *byte == 7));
                let in_one = there.len() == len && from / PAGE_BYTES == (from + len - 1) / PAGE_BYTES;
                assert_eq!(pages.within_page(from, len), in_one.then_some(there));
            }
        }
    }
}
