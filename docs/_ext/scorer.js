/* Ranks of search results: by the heading that has most of the query, to which the result then leads, and by the part of
   the site: tables of results and the changelog come last. */
const PARTS = {
  start: 4, choose: 4, "how-to": 4, tutorials: 3, explanation: 2, reference: 1, "reference/api": -3, results: -8, about: -9,
}

const stems = text => text.toLowerCase().split(/[^\p{L}\p{N}_]+/u).filter(word => word).map(word => new Stemmer().stemWord(word))

var Scorer = {
  objNameMatch: 11, objPartialMatch: 6, objPrio: {0: 15, 1: 5, 2: -5}, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,

  /* The heading of a page in which most words of the query stand: their share (less in a section's), its words and place. */
  heading: page => {
    const {alltitles, docnames, titles} = Search._index, file = docnames.indexOf(page)
    const words = stems(new URLSearchParams(location.search).get("q") || "")
    let best = {share: 0}
    for (const [title, places] of Object.entries(alltitles)) for (const [place, id] of places) {
      if (place !== file) continue
      const inside = new Set(stems(title)), whole = title === titles[file]
      const share = words.filter(word => inside.has(word)).length / (words.length || 1) * (whole ? 1 : 0.8)
      if (share > best.share) best = {share, title: whole ? title : `${titles[file]} > ${title}`, id: whole ? null : id}
    }
    return best
  },

  score: result => {
    const [page, , , , score, , kind] = result
    const part = Object.keys(PARTS).filter(name => page === name || page.startsWith(`${name}/`)).pop()
    if (kind !== "text") return score + (PARTS[part] || 0)
    const best = Scorer.heading(page)
    if (best.id && best.share > 0.7) [result[1], result[2]] = [best.title, `#${best.id}`]
    return Math.round(3 + 16 * best.share ** 2) + (PARTS[part] || 0)
  },
}
