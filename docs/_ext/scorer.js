/* Ranks of search results: what stands in one heading first, then by the part of the site; tables of results last. */
const PARTS = {
  start: 4, choose: 4, "how-to": 4, tutorials: 3, explanation: 2, reference: 1, "reference/api": 0, results: -6, about: -9,
}

const stems = text => text.toLowerCase().split(/[^\p{L}\p{N}_]+/u).filter(word => word).map(word => new Stemmer().stemWord(word))

var Scorer = {
  objNameMatch: 11, objPartialMatch: 6, objPrio: {0: 15, 1: 5, 2: -5}, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,

  /* How much of the query stands in one heading of a page: 1 in the page's title, less in a section's. */
  heading: page => {
    const {alltitles, docnames, titles} = Search._index, file = docnames.indexOf(page)
    const words = stems(new URLSearchParams(location.search).get("q") || "")
    const shares = Object.entries(alltitles).filter(([, places]) => places.some(([place]) => place === file)).map(([title]) => {
      const inside = new Set(stems(title))
      return words.filter(word => inside.has(word)).length / (words.length || 1) * (title === titles[file] ? 1 : 0.8)
    })
    return Math.max(0, ...shares)
  },

  score: ([page, , , , score, , kind]) => {
    const part = Object.keys(PARTS).filter(name => page === name || page.startsWith(`${name}/`)).pop()
    return (kind === "text" ? 3 + 16 * Scorer.heading(page) ** 2 : score) + (PARTS[part] || 0)
  },
}
